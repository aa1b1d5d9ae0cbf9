"""Threads that stand for the processes of torchrun: they start at once, and run one at a time."""

import copy
import threading


class Threads:
    """What a script finds in place of torch.distributed. A thread runs until it has to wait for the others."""

    def __init__(self, number, patience=60):
        self.number, self.patience, self.own = number, patience, threading.local()
        self.turn, self.barrier, self.values = threading.Lock(), threading.Barrier(number), [None] * number

    def is_initialized(self):
        return True

    def get_rank(self):
        return self.own.rank

    def get_world_size(self):
        return self.number

    def destroy_process_group(self):
        pass

    def all_gather_object(self, values, value):
        values[:] = self.meet("all_gather_object", value)

    def all_reduce(self, tensor):
        tensor.copy_(sum(self.meet("all_reduce", tensor)))

    def meet(self, call, value):
        """The values of all threads, as soon as all of them are here."""
        self.values[self.own.rank] = call, copy.deepcopy(value)
        self.turn.release()
        try:
            self.barrier.wait(self.patience)
            values = copy.deepcopy(self.values)
            self.barrier.wait(self.patience)
        finally:
            self.turn.acquire()
        assert all(theirs == call for theirs, _ in values), "the processes are at different places"
        return [value for _, value in values]

    def run(self, script, work):
        """[work(rank) for each rank], each in its thread, with this object as the script's `distributed`."""
        results, errors = [None] * self.number, []

        def one(rank):
            self.own.rank = rank
            with self.turn:
                try:
                    results[rank] = work(rank)
                except BaseException as error:
                    errors.append(error)
                    self.barrier.abort()

        original, script.distributed = script.distributed, self
        threads = [threading.Thread(target=one, args=[rank]) for rank in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        script.distributed = original
        for error in sorted(errors, key=lambda error: not isinstance(error, AssertionError)):
            raise error
        return results
