from django.db import models


class Order(models.Model):
    points = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"Order {self.pk}"
