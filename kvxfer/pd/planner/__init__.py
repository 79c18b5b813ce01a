"""Which set-up serves a load within its objectives: models, traces and a simulator.

``DESIGN.md`` has the equations, their sources and what they leave out.
"""

from kvxfer.pd.planner.contention import load_contention
from kvxfer.pd.planner.engine_model import EngineModel, StepModel, load_engine
from kvxfer.pd.planner.fitting import StepRow, fit_steps
from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.setup import RemoteStore, Setup, Strategy
from kvxfer.pd.planner.simulate import simulate
from kvxfer.pd.planner.simulated import SimulatedRun
from kvxfer.pd.planner.times import Times
from kvxfer.pd.planner.trace import Request, Trace
from kvxfer.pd.planner.transfer_model import TransferModel, load_transfer

__all__ = [
    "EngineModel",
    "KVSize",
    "RemoteStore",
    "Request",
    "Setup",
    "SimulatedRun",
    "StepModel",
    "StepRow",
    "Strategy",
    "Times",
    "Trace",
    "TransferModel",
    "fit_steps",
    "load_contention",
    "load_engine",
    "load_transfer",
    "simulate",
]
