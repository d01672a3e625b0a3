from django.db import models


class Copy(models.Model):
    message_id = models.UUIDField(primary_key=True)
    copied_at = models.DateTimeField()

    def __str__(self):
        return str(self.message_id)
