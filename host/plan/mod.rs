//! Demand -> Schedule -> PlanTable. Pure: no clock, no threads, no I/O; the same result on every rank.
