//! From samples to figures.

use serde::Serialize;

/// Summary of a number of samples, in their unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// The lowest.
    pub min: f64,
    /// The median; of an even number the middle between the two in the middle.
    pub median: f64,
    /// The highest.
    pub max: f64,
    /// The average.
    pub mean: f64,
    /// The number of samples; 0 for a published figure.
    pub samples: usize,
}

impl Figure {
    /// Summarizes samples in any order; `None` if there are none. Values that are not finite are left out.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.iter().copied().filter(|x| x.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        // Both are the same for an odd number.
        let (low, high) = (
            sorted.get(count.checked_sub(1)? / 2)?,
            sorted.get(count / 2)?,
        );
        Some(Self {
            min: *sorted.first()?,
            median: f64::midpoint(*low, *high),
            max: *sorted.last()?,
            mean: sorted.iter().sum::<f64>() / count as f64,
            samples: count,
        })
    }

    /// Makes a figure of a published value.
    pub(super) const fn published(value: f64) -> Self {
        Self {
            min: value,
            median: value,
            max: value,
            mean: value,
            samples: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_samples_by_hand() {
        let figure = Figure::of(&[5.0, 1.0, 4.0, 2.0, 8.0]).unwrap();
        let expected = Figure {
            min: 1.0,
            median: 4.0,
            max: 8.0,
            mean: 4.0,
            samples: 5,
        };
        assert_eq!(figure, expected);
        // An even number: between the two in the middle.
        let figure = Figure::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((figure.median, figure.mean), (2.5, 2.5));
    }

    #[test]
    fn one_sample_is_all_of_them_and_none_is_nothing() {
        let figure = Figure::of(&[7.0]).unwrap();
        let Figure {
            min,
            median,
            max,
            mean,
            samples,
        } = figure;
        assert_eq!((min, median, max, mean, samples), (7.0, 7.0, 7.0, 7.0, 1));
        assert_eq!(Figure::of(&[]), None);
        assert_eq!(Figure::of(&[f64::NAN, f64::INFINITY]), None);
        assert_eq!(Figure::of(&[f64::NAN, 2.0]).unwrap().samples, 1);
    }
}
