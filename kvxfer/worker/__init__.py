"""Workers without an engine: one holds requests and sends them, one receives and checks them."""

from kvxfer.worker.decode import DecodeWorker, Received
from kvxfer.worker.options import WorkerOptions
from kvxfer.worker.prefill import PrefillWorker, SendResult

__all__ = ["DecodeWorker", "PrefillWorker", "Received", "SendResult", "WorkerOptions"]
