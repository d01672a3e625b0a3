"""The HTTP API: check-backs and health, with Django REST framework."""
