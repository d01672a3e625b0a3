from django.apps import AppConfig


class ThirdAppConfig(AppConfig):
    name = "tests.third_app"
    outbox_extension = "tests.third_app.extension.ThirdAppExtension"
