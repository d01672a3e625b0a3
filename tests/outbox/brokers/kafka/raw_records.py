"""Records that the client in Python cannot write, stored by the library below it, as a client in another language would."""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka

from tests.kafka_node import server

TOPIC, VALUE, HEADERS = 1, 4, 10  # rd_kafka_vtype_t
SECONDS = 30


class Bytes(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_char_p), ("size", ctypes.c_size_t))


class Value(ctypes.Union):
    _fields_ = (("text", ctypes.c_char_p), ("bytes", Bytes), ("headers", ctypes.c_void_p), ("padding", ctypes.c_char * 64))


class Field(ctypes.Structure):
    """One argument of `rd_kafka_produceva`, rd_kafka_vu_t."""

    _fields_ = (("type", ctypes.c_int), ("value", Value))


def produce_with_header(topic: str, name: bytes) -> None:
    """Store a record with a header of any name."""
    [path] = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka-*")
    library = ctypes.CDLL(str(path))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    for call, result, *arguments in (
        (library.rd_kafka_conf_new, pointer),
        (library.rd_kafka_conf_set, ctypes.c_int, pointer, text, text, pointer, ctypes.c_size_t),
        (library.rd_kafka_new, pointer, ctypes.c_int, pointer, pointer, ctypes.c_size_t),
        (library.rd_kafka_headers_new, pointer, ctypes.c_size_t),
        (library.rd_kafka_header_add, ctypes.c_int, pointer, text, ctypes.c_ssize_t, text, ctypes.c_ssize_t),
        (library.rd_kafka_produceva, pointer, pointer, pointer, ctypes.c_size_t),
        (library.rd_kafka_flush, ctypes.c_int, pointer, ctypes.c_int),
        (library.rd_kafka_destroy, None, pointer),
    ):
        call.restype, call.argtypes = result, arguments
    settings = library.rd_kafka_conf_new()
    assert library.rd_kafka_conf_set(settings, b"bootstrap.servers", server().address.encode(), None, 0) == 0
    producer = library.rd_kafka_new(0, settings, None, 0)
    headers = library.rd_kafka_headers_new(1)
    library.rd_kafka_header_add(headers, name, len(name), b"value", 5)
    fields = (Field * 3)(
        Field(TOPIC, Value(text=topic.encode())),
        Field(VALUE, Value(bytes=Bytes(b"body", 4))),
        Field(HEADERS, Value(headers=headers)),
    )
    assert library.rd_kafka_produceva(producer, fields, 3) is None
    assert library.rd_kafka_flush(producer, SECONDS * 1000) == 0
    library.rd_kafka_destroy(producer)
