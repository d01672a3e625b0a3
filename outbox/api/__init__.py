"""The HTTP door (Django REST framework)."""
