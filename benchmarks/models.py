"""The one row that a publishing transaction writes beside its message."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order; its table is made by the benchmark itself."""

    customer = models.TextField()
    total = models.TextField()

    class Meta:
        managed = False
        db_table = "bench_order"

    def __str__(self) -> str:
        return f"order {self.pk}"
