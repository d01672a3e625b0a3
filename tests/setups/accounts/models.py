import uuid

from django.contrib.auth.models import AbstractBaseUser, PermissionsMixin
from django.db import models


class Account(AbstractBaseUser, PermissionsMixin):
    """A user with another primary key than Django's, and an address in place of a name."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    email = models.EmailField(unique=True)
    is_staff = models.BooleanField(default=True)

    USERNAME_FIELD = "email"

    def __str__(self) -> str:
        return self.email
