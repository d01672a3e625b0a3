"""Two releases of a project side by side. As an app it is the code of either, as its environment says."""
