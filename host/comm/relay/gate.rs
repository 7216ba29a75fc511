//! When memory may be mapped and unmapped: the driver may wait for kernels in these calls, and kernels wait for the host. So
//! it is done between kernels only, and no kernel starts while it is done.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::comm::wake::Wake;

#[derive(Default)]
struct State {
    /// The user's kernels may be queued or running.
    kernels: bool,
    /// Something waits for them to end.
    wanted: bool,
}

/// Between the thread that launches kernels and the one that maps memory.
pub struct KernelGate {
    state: Mutex<State>,
    changed: Condvar,
    wake: Arc<Wake>,
}

impl KernelGate {
    /// No kernel runs; `wake` is set when kernels have ended for which somebody waits.
    pub fn new(wake: Arc<Wake>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), wake }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before a launch: waits for what has waited for the kernels before.
    pub fn enter(&self) {
        let mut state = self.lock();
        while state.wanted && !state.kernels {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.kernels = true;
    }

    /// All kernels have ended.
    pub fn leave(&self) {
        let mut state = self.lock();
        state.kernels = false;
        if state.wanted {
            self.wake.set();
        }
    }

    /// Does `work` if no kernel runs, and keeps kernels from starting meanwhile; else false, and `wake` tells when to come
    /// again.
    pub fn while_quiet(&self, work: impl FnOnce()) -> bool {
        let mut state = self.lock();
        state.wanted = state.kernels;
        if !state.kernels {
            work();
            self.changed.notify_all();
        }
        !state.wanted
    }

    /// Nobody waits for kernels to end any more.
    pub fn give_up(&self) {
        self.lock().wanted = false;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_mapped_while_kernels_run_and_none_starts_before_it_is() {
        let gate = Arc::new(KernelGate::new(Arc::new(Wake::new().unwrap())));
        assert!(gate.while_quiet(|| {}));
        gate.enter();
        assert!(!gate.while_quiet(|| panic!("a kernel runs")));
        gate.leave();
        let (other, (done, is_done)) = (Arc::clone(&gate), std::sync::mpsc::channel());
        let launcher = std::thread::spawn(move || {
            other.enter();
            done.send(()).unwrap();
        });
        let early = is_done.recv_timeout(std::time::Duration::from_millis(50));
        assert!(early.is_err(), "a kernel started before what waited for the last one");
        assert!(gate.while_quiet(|| assert!(is_done.try_recv().is_err())));
        is_done.recv().unwrap();
        launcher.join().unwrap();
    }
}
