//! What things cost, in whole nanoseconds.

/// The constants of the cost model. Agreed between ranks: they decide which method wins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CostModel {
    /// Fixed cost of one transfer.
    pub start_ns: u64,
    /// Payload of one message: what `spray` cuts by.
    pub message_bytes: u64,
    /// Loose traffic into one NIC is slower by 1 / this for every sender after the first.
    pub fan_in_divisor: u64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { start_ns: 20_000, message_bytes: 512 << 10, fan_in_divisor: 32 }
    }
}

impl CostModel {
    /// How long loose traffic takes that would need `ns` if only one server sent to each NIC.
    pub(super) fn loose_ns(&self, ns: u64, senders: u64) -> u64 {
        // Fitted to published runs of 4 servers (orders win above about 64 MB per GPU); beyond, at most twice is a guess.
        let extra = ns / self.fan_in_divisor.max(1);
        ns.saturating_add(extra.saturating_mul(senders.saturating_sub(1)).min(ns))
    }
}

/// Time for `bytes` at `mbit_per_s`, rounded up. A rate of 0 never ends.
pub(super) fn wire_ns(bytes: u64, mbit_per_s: u64) -> u64 {
    if mbit_per_s == 0 {
        return if bytes == 0 { 0 } else { u64::MAX };
    }
    // 1 Mbit/s is 1/8000 byte per nanosecond.
    match bytes.checked_mul(8000) {
        Some(bits) => bits.div_ceil(mbit_per_s),
        None => u64::try_from((u128::from(bytes) * 8000).div_ceil(mbit_per_s.into())).unwrap_or(u64::MAX),
    }
}

/// `a * b / c`, rounded down, for results that fit.
pub(super) fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    match a.checked_mul(b) {
        Some(product) => product / c,
        None => (u128::from(a) * u128::from(b) / u128::from(c)) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_time_is_exact_and_never_overflows() {
        assert_eq!(wire_ns(50_000, 400_000), 1000);
        assert_eq!(wire_ns(1, 400_000), 1);
        assert_eq!(wire_ns(0, 0), 0);
        assert_eq!(wire_ns(1, 0), u64::MAX);
        assert_eq!(wire_ns(1 << 62, 1 << 20), 8000 << 42);
        assert_eq!(wire_ns(u64::MAX, 1), u64::MAX);
    }

    #[test]
    fn fan_in_costs_up_to_as_much_again() {
        let model = CostModel::default();
        assert_eq!(model.loose_ns(3200, 1), 3200);
        assert_eq!(model.loose_ns(3200, 4), 3500);
        assert_eq!(model.loose_ns(3200, 1000), 6400);
    }
}
