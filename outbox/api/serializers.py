"""The fields of a check-back."""

from __future__ import annotations

from datetime import UTC

from rest_framework import serializers

ID_LENGTH = 255
INT4_MAX = 2**31 - 1


class HalfSerializer(serializers.Serializer[dict[str, object]]):
    """A half message as its broker asks about it; ids are passed on unchanged."""

    topic = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False)
    message_id = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False)
    half_id = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False)
    token = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False, allow_blank=True, default="")
    asked = serializers.IntegerField(min_value=1, max_value=INT4_MAX, default=1)
    born_at = serializers.DateTimeField(allow_null=True, default=None, default_timezone=UTC)
    key = serializers.CharField(trim_whitespace=False, allow_blank=True, default="")
