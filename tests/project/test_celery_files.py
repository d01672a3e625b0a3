import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from kombu import Connection, Exchange, Queue

from project.celery_files import Channel, Transport

WRITERS, READERS, TASKS = 3, 2, 500
SPAWN = multiprocessing.get_context("spawn")
END = "end"


def connect(folder: Path) -> Connection:
    return Connection(transport=Transport, transport_options={"folder": str(folder), "polling_interval": 0.001})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "celery"


class TestChannel:
    def test_hands_a_task_to_another_connection(self, folder):
        with connect(folder) as writer, connect(folder) as reader:
            writer.SimpleQueue("outbox").put({"topic": "orders"})
            message = reader.SimpleQueue("outbox").get(timeout=5)

        assert message.payload == {"topic": "orders"}

    def test_leaves_the_tasks_of_other_queues(self, folder):
        with connect(folder) as connection:
            connection.SimpleQueue("shop").put("mail")
            queue = connection.SimpleQueue("outbox")

            with pytest.raises(queue.Empty):
                queue.get(block=False)

    def test_keeps_the_order_of_the_tasks(self, folder):
        with connect(folder) as connection:
            queue = connection.SimpleQueue("outbox")
            for number in range(20):
                queue.put(number)
            numbers = [queue.get(timeout=5).payload for _ in range(20)]

        assert numbers == list(range(20))

    def test_leaves_no_files_of_tasks_it_gave(self, folder):
        with connect(folder) as connection:
            queue = connection.SimpleQueue("outbox")
            queue.put("wakeup")
            queue.get(timeout=5).ack()

        assert [path for path in folder.rglob("*wakeup*") if path.is_file()] == []
        assert list((folder / "tasks").iterdir()) == list((folder / "taken").iterdir()) == []

    def test_gives_each_task_whole_to_one_reader_while_processes_write_and_read_at_once(self, folder):
        with ProcessPoolExecutor(WRITERS + READERS, mp_context=SPAWN) as pool:
            readers = [pool.submit(read, folder) for _ in range(READERS)]
            writers = [pool.submit(write, folder, number) for number in range(WRITERS)]
            for writer in writers:
                writer.result()
            with connect(folder) as connection:
                for _ in readers:
                    connection.SimpleQueue("outbox").put(END)
            taken = [task for reader in readers for task in reader.result()]

        assert sorted(taken) == [[writer, number] for writer in range(WRITERS) for number in range(TASKS)]

    def test_keeps_each_queue_that_processes_bind_to_a_new_exchange_at_once(self, folder):
        barrier = SPAWN.Barrier(3)
        processes = [SPAWN.Process(target=bind, args=(folder, barrier, f"queue-{number}")) for number in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

        with connect(folder) as connection:
            channel: Channel = connection.channel()
            bound = [{row.queue for row in channel.get_table(f"exchange-{number}")} for number in range(100)]

        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert bound == [{"queue-0", "queue-1", "queue-2"}] * 100


def write(folder: Path, writer: int) -> None:
    with connect(folder) as connection:
        queue = connection.SimpleQueue("outbox")
        for number in range(TASKS):
            queue.put([writer, number])


def read(folder: Path) -> list[list[int]]:
    """Take tasks until one says that this was all; each reader gets one of those."""
    taken: list[list[int]] = []
    with connect(folder) as connection:
        queue = connection.SimpleQueue("outbox")
        while (message := queue.get(timeout=30)).payload != END:
            message.ack()
            taken.append(message.payload)
        message.ack()
    return taken


def bind(folder: Path, barrier: Barrier, queue: str) -> None:
    with connect(folder) as connection:
        channel = connection.channel()
        for number in range(100):
            barrier.wait(20)
            Queue(queue, Exchange(f"exchange-{number}"), routing_key=queue)(channel).declare()
