//! From samples to figures.

use serde::Serialize;

/// Summary of a number of samples, in their unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// How many.
    pub samples: usize,
    /// The lowest.
    pub min: f64,
    /// The first quartile.
    pub lower: f64,
    /// The median.
    pub median: f64,
    /// The third quartile.
    pub upper: f64,
}

impl Figure {
    /// Summarizes samples in any order; `None` if there are none. Values that are not finite are left out.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.iter().copied().filter(|x| x.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            samples: sorted.len(),
            min: *sorted.first()?,
            lower: quantile(&sorted, 0.25)?,
            median: quantile(&sorted, 0.5)?,
            upper: quantile(&sorted, 0.75)?,
        })
    }
}

/// The quantile `q` of sorted samples; between two samples it is interpolated.
fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let at = q * (sorted.len().checked_sub(1)?) as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    let first = *sorted.get(low)?;
    let second = *sorted.get(low + 1).unwrap_or(&first);
    Some(first + (second - first) * part)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_where_they_should() {
        let figure = Figure::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        let (min, lower, median, upper) = (1.0, 2.0, 3.0, 4.0);
        let samples = 5;
        assert_eq!(
            figure,
            Figure {
                samples,
                min,
                lower,
                median,
                upper
            }
        );
        // An even number: between the two in the middle.
        let figure = Figure::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!(
            (figure.lower, figure.median, figure.upper),
            (1.75, 2.5, 3.25)
        );
    }

    #[test]
    fn one_sample_is_all_of_them_and_none_is_nothing() {
        let figure = Figure::of(&[7.0]).unwrap();
        assert_eq!((figure.min, figure.median, figure.upper), (7.0, 7.0, 7.0));
        assert_eq!(Figure::of(&[]), None);
        assert_eq!(Figure::of(&[f64::NAN]), None);
        assert_eq!(Figure::of(&[f64::NAN, 2.0]).unwrap().samples, 1);
    }
}
