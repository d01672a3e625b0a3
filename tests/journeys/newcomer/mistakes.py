"""
What a newcomer does wrong, and the sentence that says so.

Each mistake is said at the earliest moment at which it can be known: by the system checks, else by the call, else by a command.
"""

from tests.journeys.newcomer.project import SETTINGS, Command, Play

MESSAGES, CONSUMERS, ORDERS, URLS = "shop/messages.py", "shop/consumers.py", "shop/orders.py", "mysite/urls.py"
APPS = '"outbox", "outbox.embedded", "shop"'
TOPICS = '{"orders": {}}'
DECORATOR = '@consumer(OrderPlaced, group="points")'

CHECK: Command = ("check",)
CHECK_DATABASE: Command = ("check", "--database", "default")
CHECK_DEPLOY: Command = ("check", "--deploy")

IMPORTS = """
from outbox import *
from django.db import transaction as django_transaction
from shop.messages import *
from shop.models import Order
"""


def call(expression: str, *, inside: bool = True) -> Command:
    """Return a command that publishes from a shell, in a transaction of Django's own or outside of one."""
    block = f"with django_transaction.atomic():\n    {expression}" if inside else expression
    return "shell", "--no-imports", "-c", f"{IMPORTS}\n{block}"


def task(expression: str) -> Command:
    """Return a command that sends a task from a shell, in a transaction."""
    code = f"from django.db import transaction\nfrom shop.tasks import *\nwith transaction.atomic():\n    {expression}"
    return "shell", "--no-imports", "-c", code


def checked(mistake: str, says: str, *edits: tuple[str, str, str], page: str = "README.md") -> Play:
    """Return a play whose one mistake the system checks find."""
    return Play({CHECK: {mistake: says}}, edits, page=page)


def broker(alias: str, backend: str, options: str = "{}") -> str:
    """Return lines of the settings: a broker, and a topic that goes there."""
    entry = f'OUTBOX["BROKERS"]["{alias}"] = {{"BACKEND": "{backend}", "OPTIONS": {options}}}'
    return f'{entry}\nOUTBOX["TOPICS"]["{alias}"] = {{"BROKER": "{alias}"}}\n'


def only_rabbitmq(options: str) -> str:
    """Return lines of the settings: a RabbitMQ carries all topics."""
    brokers = f'{{"default": {{"BACKEND": "{RABBITMQ}", "OPTIONS": {options}}}}}'
    return f'OUTBOX |= {{"TOPICS": {{"orders": {{}}}}, "BROKERS": {brokers}}}'


RABBITMQ = "outbox.brokers.rabbitmq.RabbitMQBroker"

BROKERS = (
    'OUTBOX["BROKERS"] = {"default": {}}\n'
    + broker("typo", "outbox.brokers.rabbitmq.RabbitMqBroker")
    + broker("no-nodes", RABBITMQ)
    + broker("unknown", RABBITMQ, '{"NODES": ["rabbit-1"], "HOST": "rabbit-1"}')
    + broker("url", RABBITMQ, '{"NODES": ["amqp://guest@rabbit-1"]}')
    + broker("kind", RABBITMQ, '{"NODES": "rabbit-1"}')
    + broker("extra", "outbox.brokers.rocketmq.RocketMQBroker")
    + 'import sys; sys.modules["grpc"] = None\n'
)

TYPES = """
class Elsewhere(Message):
    class Meta:
        topic = "order"
class Homeless(Message): ...
class Second(Message):
    class Meta:
        topic, version = "orders", 2
class WithRow(Message):
    order: "Order"
    class Meta:
        topic = "orders"
class Keyed(Message):
    order_id: int
    class Meta:
        topic, key, mask = "orders", "order", ["card"]
class Unordered(Message):
    order_id: int
    class Meta:
        topic = "steps"
class Free(Message):
    data: dict
    class Meta:
        topic = "orders"
from shop.models import Order
"""

HANDLERS = """
from outbox import check_back
from shop.messages import *
@consumer(topic="orders", group="elsewhere", using="reports")
def elsewhere(message, context): ...
@consumer(topic="order", group="nowhere")
def nowhere(message, context): ...
@check_back("order")
def did_it_commit(half): ...
"""

WRONG_FREE = "\nclass Free(Message):\n    data: dict\n    class Meta:\n        topic = 'orders'\n"

CHECKED = [
    checked(
        "the app is not in INSTALLED_APPS",
        'The project uses outbox, which is not in INSTALLED_APPS. Add to the settings: INSTALLED_APPS += ["outbox"]. '
        "Then run manage.py migrate.",
        (SETTINGS, APPS, '"shop"'),
        (URLS, "", "from shop import orders"),
    ),
    checked(
        "the app is not in INSTALLED_APPS, and Celery's tasks use it",
        'The project uses outbox, which is not in INSTALLED_APPS. Add to the settings: INSTALLED_APPS += ["outbox"]. ',
        (SETTINGS, 'INSTALLED_APPS += ["outbox"]', ""),
        (URLS, "", "from shop import tasks"),
        page="celery-tasks.md",
    ),
    checked(
        "the broker's app is not in INSTALLED_APPS",
        '(outbox.E042) OUTBOX["BROKERS"]["default"] needs the tables of the app outbox.embedded, which is not in INSTALLED_APPS.',
        (SETTINGS, '"outbox.embedded", ', ""),
    ),
    checked(
        "the database is SQLite",
        "(outbox.E007) Database 'default' is sqlite. The outbox needs PostgreSQL 14 or later, with psycopg 3.",
        (SETTINGS, "", 'DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}'),
    ),
    checked(
        "a section has another name",
        "(outbox.E001) OUTBOX has an unknown setting 'TOPIC'.\n\tHINT: Did you mean TOPICS?",
        (SETTINGS, '{"TOPICS"', '{"TOPIC"'),
    ),
    checked(
        "a setting is misspelt",
        '(outbox.E001) OUTBOX["TOPICS"]["orders"] has an unknown setting \'RETENTON\'.\n\tHINT: Did you mean RETENTION?',
        (SETTINGS, TOPICS, '{"orders": {"RETENTON": "P7D"}}'),
    ),
    checked(
        "a duration is a number",
        'OUTBOX["TOPICS"]["orders"]["RETENTION"] has a wrong value: Expected a duration, got `int`.\n'
        "\tHINT: Write timedelta(seconds=...)",
        (SETTINGS, TOPICS, '{"orders": {"RETENTION": 7}}'),
    ),
    checked(
        "the topics are a list",
        'OUTBOX["TOPICS"] has a wrong value: Expected a dict, got a list.\n\tHINT: Write {"NAME": {...}}, an entry for each',
        (SETTINGS, TOPICS, '["orders"]'),
    ),
    checked(
        "a topic has a type that there is not",
        "Invalid enum value 'transactional'.\n\tHINT: Choices are: 'normal', 'transaction', 'fifo', 'delay'.",
        (SETTINGS, TOPICS, '{"orders": {"TYPE": "transactional"}}'),
    ),
    checked(
        "a handler's arguments are swapped",
        "The first argument of shop.consumers.add_points is the message, but is named 'context'. Write handler(message, context)",
        (CONSUMERS, "(message)", "(context, message)"),
    ),
    checked(
        "a handler takes no argument",
        "shop.consumers.add_points cannot be called as handler(message, context)",
        (CONSUMERS, "(message)", "()"),
    ),
    checked(
        "a group has two handlers of a type",
        "shop.consumers.add_points and shop.consumers.again both handle OrderPlaced in the group 'points'. Give one of them "
        "another group",
        (CONSUMERS, "", f"{DECORATOR}\ndef again(message, context): ..."),
    ),
    checked(
        "a consumer has no group",
        '@consumer needs the name of a group: @consumer(OrderPlaced, group="cart").',
        (CONSUMERS, DECORATOR, "@consumer(OrderPlaced)"),
    ),
    checked(
        "@consumer has no arguments",
        "@consumer takes message types, not <function add_points",
        (CONSUMERS, DECORATOR, "@consumer"),
    ),
    checked(
        "a consumer's type has no topic",
        "OrderPlaced has no topic. Add `topic` to its class Meta.",
        (MESSAGES, 'topic = "orders"', ""),
    ),
    checked(
        "@transactional decorates a class",
        "@transactional cannot decorate the class Place. Decorate a method of it, or use @method_decorator",
        (ORDERS, "", "from outbox import transactional\n@transactional\nclass Place: ..."),
        (URLS, "", "from shop import orders"),
    ),
    checked(
        "a task's topic is in TOPICS",
        'OUTBOX["BROKERS"]["celery"]: (outbox.E004) Topic \'orders\' cannot use this broker',
        (SETTINGS, "", 'OUTBOX["TOPICS"] = {"orders": {"BROKER": "celery"}}'),
        page="celery-tasks.md",
    ),
    checked(
        "the project imports no Celery app",
        'OUTBOX["BROKERS"]["celery"]: (outbox.E004) No Celery app is imported.',
        ("mysite/__init__.py", "from mysite.celery import app", ""),
        page="celery-tasks.md",
    ),
    checked(
        "Celery's beat has no schedule",
        "(outbox.W030) Celery's beat has no entry for outbox.tasks.sweep",
        (SETTINGS, '"CELERY_WAKEUP": False,', ""),
        page="celery-tasks.md",
    ),
    checked(
        "Celery's beat consumes for a group that is misspelt",
        "(outbox.E058) Celery's beat consumes for the group 'pionts', which has no @consumer.",
        (SETTINGS, "", "from outbox.schedule import beat_schedule\nCELERY_BEAT_SCHEDULE = beat_schedule(consume=['pionts'])"),
        page="celery-tasks.md",
    ),
    Play(
        {
            CHECK: {
                "a type's topic is misspelt": "(outbox.E006) Message type shop.messages.Elsewhere: Topic 'order' is not in "
                "OUTBOX[\"TOPICS\"].\n\tHINT: Did you mean 'orders'?",
                "a type has no topic": "(outbox.E005) Message type shop.messages.Homeless has no topic",
                "a version has no upgrade": (
                    "Second is at version 2 and has no upgrade from version 1, whose messages would become dead "
                    "letters.\n\tHINT: Add @Second.upgrade_from(1)"
                ),
                "a field is a row": "WithRow has the field 'order' of type shop.models.Order, which JSON cannot represent.",
                "the key is not a field": (
                    "Keyed has Meta.key = 'order', which is not a field of it.\n\tHINT: Its fields are: order_id."
                ),
                "a masked name is not a field": "Keyed masks 'card', which is not a field of it, so this hides nothing.",
                "a type of an ordered topic has no key": "(outbox.W014) Message type shop.messages.Unordered has no key",
                "a consumer's database is misspelt": "(outbox.E017) shop.consumers.elsewhere writes to the database 'reports', "
                "which is not in DATABASES.\n\tHINT: Choices are: default.",
                "a consumer's topic is misspelt": "(outbox.E016) shop.consumers.nowhere: Topic 'order' is not in",
                "a check-back is for a misspelt topic": (
                    "(outbox.W026) @check_back('order') is shop.consumers.did_it_commit, but that topic has no check-backs."
                ),
            }
        },
        [(MESSAGES, "", TYPES), (CONSUMERS, "", HANDLERS), (SETTINGS, TOPICS, TOPICS[:-1] + ', "steps": {"TYPE": "fifo"}}')],
    ),
    Play(
        {
            CHECK: {
                "a backend is misspelt": '"outbox.brokers.rabbitmq" does not define a "RabbitMqBroker" attribute/class.\n\t'
                "HINT: Its topics are: typo. Correct the path, which names a module and a class in it, such as",
                "a required option is missing": '["no-nodes"]: (outbox.E004) OPTIONS has no NODES, which is required.',
                "an option is unknown": (
                    "[\"unknown\"]: (outbox.E004) OPTIONS has an unknown setting 'HOST'.\n\tHINT: Choices are: NODES, USER,"
                ),
                "a node is a URL": (
                    "OPTIONS[\"NODES\"] has 'amqp://guest@rabbit-1', which is not host:port.\n\tHINT: Write it like"
                ),
                "an option is of another kind": 'OPTIONS["NODES"] has a wrong value: Expected a list, got `str`.',
                "an extra is not installed": "pip install 'django-transactional-outbox[rocketmq]'",
            }
        },
        [(SETTINGS, "", BROKERS)],
    ),
    Play(
        {
            CHECK: {
                "a group of GROUPS is misspelt": (
                    "names the group 'point', in which no @consumer of this project is.\n\tHINT: Did you mean 'points'?"
                ),
            }
        },
        [
            (SETTINGS, "", only_rabbitmq('{"NODES": ["rabbit-1"], "GROUPS": {"orders": ["point"]}}')),
        ],
    ),
    Play(
        {
            CHECK: {
                "the check-back URL has no endpoint": (
                    '(outbox.W054) OUTBOX["CHECK_BACK"]["URL"] is \'https://shop/outbox/check-back/\', but the project\'s '
                    'URLs have no check-back endpoint.\n\tHINT: Add path("outbox/", include("outbox.api.urls"))'
                ),
                "the check-back URL has no secret": (
                    '(outbox.E012) OUTBOX["CHECK_BACK"]["SECRETS"] is empty, but the check-back URL accepts signed requests only.'
                ),
            }
        },
        [(SETTINGS, "", 'OUTBOX["CHECK_BACK"] = {"URL": "https://shop/outbox/check-back/"}')],
    ),
    checked(
        "a secret is short",
        '(outbox.E011) OUTBOX["CHECK_BACK"]["SECRETS"], number 1: A secret has 4 bytes; at least 32 are required.',
        (SETTINGS, "", 'OUTBOX["CHECK_BACK"] = {"SECRETS": ["secret"]}'),
    ),
    Play(
        {
            CHECK_DEPLOY: {
                "the endpoint has no secret": "(outbox.W029) The check-back endpoint answers all requests with 503, because "
                'OUTBOX["CHECK_BACK"]["SECRETS"] is empty.'
            }
        },
        [(URLS, "", 'from django.urls import include\nurlpatterns += [path("outbox/", include("outbox.api.urls"))]')],
        quiet=[CHECK],
    ),
]

NO_TABLES = "Database 'default' has no tables of the outbox. Run manage.py migrate --database default."

CALLED = [
    Play(
        {
            call("publish(OrderPlaced(order_id=1))", inside=False): {
                "a message is published outside of a transaction": (
                    "NotInTransaction: OrderPlaced was published outside a transaction of database 'default', so nothing "
                    "would tie it to the rows. Decorate the view or function with @transactional"
                ),
            },
            call("django_transaction.on_commit(lambda: publish(OrderPlaced(order_id=1)))"): {
                "a message is published after the commit": "NotInTransaction: OrderPlaced was published outside a transaction"
            },
            call("apublish(OrderPlaced(order_id=1))"): {
                "apublish() is called in synchronous code": (
                    "NotAwaited: apublish() was called in synchronous code, where nothing awaits it. Call publish() there."
                ),
            },
            call(
                "@transactional\nasync def place():\n    apublish(OrderPlaced(order_id=1))\nimport asyncio; asyncio.run(place())",
                inside=False,
            ): {"await is forgotten": "NotAwaited: apublish() was called once and not awaited before the end of the transaction"},
            call("publish(OrderPlaced)"): {
                "a type is published": (
                    "publish() takes an instance of a Message type, not <class 'shop.messages.OrderPlaced'>. Write "
                    "OrderPlaced(...)."
                ),
            },
            call("publish({'order_id': 1})"): {
                "a dict is published": "publish() takes an instance of a Message type, not {'order_id': 1}. Define one, or use "
                "publish_raw()."
            },
            call("publish(OrderPlaced())"): {"a field is missing": "OrderPlaced needs 'order_id'. Its fields are: order_id."},
            call("publish(OrderPlaced(order=1))"): {
                "a field is unknown": "OrderPlaced has no field 'order' and needs 'order_id'. Its fields are: order_id."
            },
            call("publish(OrderPlaced(order_id='abc'))"): {
                "a field has another type": (
                    "OrderPlaced has a field that is not of its declared type: order_id: Expected `int`, got `str`. "
                    "Correct the value, or the type."
                ),
            },
            call("publish(OrderPlaced(order_id=Order()))"): {
                "a row is in a field": "OrderPlaced cannot be written as JSON: its field 'order_id' holds a shop.models.Order."
            },
            call("publish(Free(data={'total': float('nan')}))"): {
                "a number is NaN": (
                    "Free cannot be written as JSON: its field 'data' has a number that is infinite or not a number (NaN)."
                ),
            },
            call("publish(OrderPlaced(order_id=1), key='k' * 300)"): {
                "a key is too long": "A key is a string of at most 255 characters without control characters."
            },
            call("publish(OrderPlaced(order_id=1), delay=60)"): {
                "a delay is a number": "OrderPlaced cannot be delayed by 60. A delay is a timedelta from 0 to 365 days."
            },
            call("publish(OrderPlaced(order_id=1), about=Order())"): {
                "the row is not saved": (
                    "OrderPlaced is about a row of shop.Order that has no primary key. Publish after it is saved"
                ),
            },
            call("publish(OrderPlaced(order_id=1), about=5)"): {
                "a primary key is given as the row": "OrderPlaced is about 5, which is not a model instance. Pass the row itself."
            },
            call("publish(OrderPlaced(order_id=1), about=Order.objects.using('other').create())"): {
                "the row is in another database": (
                    "OrderPlaced was published outside a transaction of database 'other', so nothing would tie it to the "
                    "rows. Transactions are open in: default."
                ),
            },
            call("publish_raw('order', {})"): {
                "a topic is misspelt": "UnknownTopic: Topic 'order' is not in OUTBOX[\"TOPICS\"]. Did you mean 'orders'?"
            },
        },
        [(MESSAGES, "", WRONG_FREE)],
        quiet=[CHECK],
        database="migrated",
        other_database=True,
    ),
    Play(
        {
            task("send_receipt.delay_in_transaction()"): {
                "a task lacks an argument": "send_receipt() missing 1 required positional argument: 'order_id'"
            },
            ("shell", "--no-imports", "-c", "from shop.tasks import send_receipt; send_receipt.delay_in_transaction(1)"): {
                "a task is sent outside of a transaction": "Task shop.tasks.send_receipt was published outside a transaction"
            },
        },
        quiet=[CHECK],
        page="celery-tasks.md",
        database="migrated",
    ),
    Play(
        {
            task("send_receipt.delay_in_transaction(1)"): {
                "there is no broker for tasks": (
                    'OUTBOX["BROKERS"] has no broker for Celery\'s tasks. Add one: "celery": {"BACKEND": '
                    '"outbox.celery.CeleryBroker"}.'
                ),
            }
        },
        [(SETTINGS, '{"celery": {"BACKEND": "outbox.celery.CeleryBroker"}}', "{}")],
        quiet=[CHECK],
        page="celery-tasks.md",
        database="migrated",
    ),
]

COMMANDS = [
    Play(
        {
            CHECK_DATABASE: {
                "migrate was not run": "(outbox.database_unfit) "
                + NO_TABLES.replace("Database 'default'", "It").replace(". ", ".\n\tHINT: ", 1)
            },
            call("publish(OrderPlaced(order_id=1))"): {"publish() before migrate": NO_TABLES},
            ("outbox_relay", "--once"): {"a relay before migrate": f"CommandError: {NO_TABLES}"},
            ("outbox_status",): {"the status before migrate": f"CommandError: {NO_TABLES}"},
            ("outbox_doctor",): {
                "the doctor before migrate": (
                    "The tables of the embedded broker are missing in database 'default'.\n    Run manage.py migrate "
                    "--database default."
                ),
            },
        },
        quiet=[CHECK],
        database="empty",
    ),
    Play(
        {
            ("outbox_consume", "--group", "point", "--until-idle"): {
                "a group is misspelt": "CommandError: No @consumer is in the group 'point'. Choices are: points."
            },
            ("outbox_replay", "--topic", "order"): {
                "outbox_replay has a misspelt topic": "CommandError: There is no topic 'order'. Choices are: orders."
            },
            ("outbox_replay", "--group", "point"): {
                "outbox_replay has a misspelt group": "CommandError: There is no group 'point'. Choices are: points."
            },
            ("outbox_pause", "order"): {
                "outbox_pause has a misspelt topic": "CommandError: There is no topic 'order'. Choices are: orders."
            },
            ("outbox_relay", "--once", "--broker", "embedded"): {
                "a broker is misspelt": "CommandError: There is no broker 'embedded' in settings. Choices are: default."
            },
            ("outbox_relay", "--once", "--database", "shop"): {
                "a database is misspelt": "CommandError: There is no database 'shop' in settings. Choices are: default."
            },
            call("publish(OrderPlaced(order_id=1))"): {},
            ("outbox_status",): {
                "no relay was started": "! Broker 'default': (outbox.no_relay) No relay is running. Start outbox_relay"
            },
            ("outbox_replay", "--unsent", "--topic", "order"): {
                "outbox_replay --unsent has a misspelt topic": "There is no topic 'order'. Choices are: orders."
            },
            ("outbox_relay", "--once", "-v1"): {},
            ("outbox_doctor",): {
                "no consumer was started": "the group has never received a message.\n    Start outbox_consume --group points"
            },
            ("outbox_consume", "--group", "points", "--until-idle"): {
                "a handler raises": "retry in ",
                "a handler raises an error of the user's": "FieldDoesNotExist: Order has no field named 'point'",
            },
        },
        [(CONSUMERS, "points=10", "point=10")],
        quiet=[CHECK, CHECK_DATABASE],
        database="migrated",
    ),
    Play(
        {
            ("outbox_consume", "--group", "points"): {
                "the consumers are in a module that is not imported": (
                    "CommandError: No @consumer is in the group 'points'. There are no groups. Write handlers into consumers.py "
                    "of an app in INSTALLED_APPS."
                ),
            },
            ("outbox_consume",): {
                "no consumer is imported": (
                    "CommandError: No @consumer is defined. Define one in consumers.py of an installed app."
                ),
            },
        },
        [
            (CONSUMERS, DECORATOR, "if __name__ == '__main__':\n  " + DECORATOR),
            (CONSUMERS, "\ndef add_points", "\n  def add_points"),
            (CONSUMERS, "    Order.objects", "      Order.objects"),
        ],
        quiet=[CHECK],
        database="migrated",
    ),
    Play(
        {
            call("publish(OrderPlaced(order_id=1))"): {},
            ("outbox_relay", "--once"): {
                "RabbitMQ has another address": "No node of RabbitMQ could be connected to: 127.0.0.1:1: ConnectionRefusedError"
            },
            ("outbox_doctor",): {
                "the doctor is asked about another address": "Start it, correct what its error names, or correct OUTBOX"
            },
        },
        [
            (SETTINGS, "", only_rabbitmq('{"NODES": ["127.0.0.1:1"]}')),
        ],
        quiet=[CHECK],
        database="migrated",
    ),
]

MISTAKES = [*CHECKED, *CALLED, *COMMANDS]
