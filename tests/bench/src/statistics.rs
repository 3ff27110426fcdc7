//! Medians and spreads. Other work of the machine shows in the mean, and little in the median.

use serde::{Deserialize, Serialize};

/// Median and middle half of measured values.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    /// Value below which a quarter of the values are.
    pub low: f64,
    /// Value above which a quarter of the values are.
    pub high: f64,
    pub count: usize,
}

impl Spread {
    /// Returns the spread, or `None` without values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted = Vec::from_iter(values);
        sorted.sort_unstable_by(f64::total_cmp);
        let quantile = |part| quantile(&sorted, part);
        Some(Self {
            median: quantile(0.5)?,
            low: quantile(0.25)?,
            high: quantile(0.75)?,
            count: sorted.len(),
        })
    }

    /// Returns the spread of `others / values`, one by one. What disturbs both of a pair does not
    /// show in it.
    pub fn of_ratios(values: &[f64], others: &[f64]) -> Option<Self> {
        let pairs = values.iter().zip(others).filter(|(value, _)| **value > 0.0);
        Self::of(pairs.map(|(value, other)| other / value))
    }
}

/// Returns a quantile, in proportion between two values.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let index = sorted.len().checked_sub(1)? as f64 * part;
    let (below, above) = (sorted.get(index.floor() as usize)?, sorted.get(index.ceil() as usize)?);
    Some(below + (above - below) * index.fract())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing(&[], None)]
    #[case::one(&[3.0], Some((3.0, 3.0, 3.0, 1)))]
    #[case::between_two(&[1.0, 2.0], Some((1.25, 1.5, 1.75, 2)))]
    #[case::unsorted_with_an_outlier(&[5.0, 900.0, 4.0, 3.0, 1.0], Some((3.0, 4.0, 5.0, 5)))]
    fn spreads(#[case] values: &[f64], #[case] expected: Option<(f64, f64, f64, usize)>) {
        let found = Spread::of(values.iter().copied());
        assert_eq!(found.map(|spread| (spread.low, spread.median, spread.high, spread.count)), expected);
    }

    #[test]
    fn ratios_are_of_pairs_and_leave_out_what_has_no_baseline() {
        let ratio = Spread::of_ratios(&[100.0, 0.0, 50.0], &[50.0, 10.0, 50.0]).unwrap();
        assert_eq!((ratio.median, ratio.count), (0.75, 2));
    }
}
