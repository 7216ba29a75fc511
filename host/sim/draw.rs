//! Numbers of some laws, from a seed.

use super::campaign::random::Random;

/// A source of numbers.
#[derive(Clone, Debug)]
pub(super) struct Draw(Random);

impl Draw {
    /// Equal seeds, equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// Between 0 and 1, neither of them.
    pub fn unit(&mut self) -> f64 {
        ((self.0.draw() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Exponential, of this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Log-normal, of this median.
    pub fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        let (r, angle) = ((-2.0 * self.unit().ln()).sqrt(), std::f64::consts::TAU * self.unit());
        median * (sigma * r * angle.cos()).exp()
    }

    /// An index, with chances in proportion to `weights`.
    pub fn weighted(&mut self, weights: &[f64]) -> usize {
        let mut left = self.unit() * weights.iter().sum::<f64>();
        let found = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        found.unwrap_or(weights.len() - 1)
    }
}

/// Weights of the first `n` places of a Zipf law.
pub(super) fn zipf(n: usize, exponent: f64) -> Vec<f64> {
    (1..=n).map(|place| (place as f64).powf(-exponent)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_what_they_should_be() {
        let mut draw = Draw::new(1);
        let mean = |f: &mut dyn FnMut() -> f64| (0..20_000).map(|_| f()).sum::<f64>() / 20_000.0;
        assert!((mean(&mut || draw.exponential(3.0)) - 3.0).abs() < 0.1);
        let mut draw = Draw::new(2);
        // A log-normal's mean is its median times e^(sigma^2 / 2).
        assert!((mean(&mut || draw.log_normal(2.0, 0.5)) - 2.0 * 0.125f64.exp()).abs() < 0.05);
        let mut draw = Draw::new(3);
        assert!((mean(&mut || draw.weighted(&[1.0, 3.0]) as f64) - 0.75).abs() < 0.02);
    }
}
