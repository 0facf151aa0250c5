//! Plots as SVG: lines over two logarithmic axes.

use std::fmt::Write as _;

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What stands above.
    pub title: String,
    /// Below the horizontal axis.
    pub x: Axis,
    /// Beside the vertical axis.
    pub y: Axis,
    /// The lines.
    pub lines: Vec<Line>,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it says, with its unit.
    pub title: String,
    /// The factor from one line of the grid to the next.
    pub step: f64,
    /// A value as it stands at the axis.
    pub show: fn(f64) -> String,
}

/// A line.
#[derive(Clone, Debug)]
pub struct Line {
    /// What it is.
    pub name: String,
    /// Dashed: a limit, or a rival's.
    pub dashed: bool,
    /// Points from left to right; what is not positive is left out.
    pub points: Vec<(f64, f64)>,
}

/// One direction of a plot: values to places.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    /// The values at the ends, both powers of the step.
    low: f64,
    high: f64,
    /// The places of the ends.
    from: f64,
    to: f64,
    step: f64,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 398.0;
/// Lines of the grid at most.
const GRID: f64 = 12.0;

/// Colours that people with any sight tell apart (Okabe and Ito), dark enough on white.
const COLOURS: [&str; 10] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#333333", "#7b3294",
    "#8c510a", "#999999",
];

impl Scale {
    /// A scale for these values, from one place to another; `None` without positive values.
    pub(crate) fn of(
        values: impl Iterator<Item = f64>,
        step: f64,
        from: f64,
        to: f64,
    ) -> Option<Self> {
        let positive = values.filter(|value| value.is_finite() && *value > 0.0);
        let ends = positive.fold(None, |ends: Option<(f64, f64)>, value| {
            let (low, high) = ends.unwrap_or((value, value));
            Some((low.min(value), high.max(value)))
        });
        let (low, high) = ends?;
        // A value at a line of the grid ends the plot there, whatever the logarithm rounds to.
        let log = |value: f64| value.ln() / step.ln();
        let (first, last) = ((log(low) + 1e-9).floor(), (log(high) - 1e-9).ceil());
        let last = if last <= first { first + 1.0 } else { last };
        let (low, high) = (step.powf(first), step.powf(last));
        Some(Self {
            low,
            high,
            from,
            to,
            step,
        })
    }

    /// The place of a value.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }

    /// The values at the lines of the grid.
    pub(crate) fn grid(&self) -> Vec<f64> {
        let steps = ((self.high / self.low).ln() / self.step.ln()).round();
        let every = (steps / GRID).ceil().max(1.0) as usize;
        let at = |n: usize| self.low * self.step.powi(n as i32);
        (0..=steps as usize).step_by(every).map(at).collect()
    }
}

impl Plot {
    /// The picture; `None` without a point.
    pub fn svg(&self) -> Option<String> {
        let points = || {
            self.lines
                .iter()
                .flat_map(|line| &line.points)
                .filter(is_shown)
        };
        let x = Scale::of(points().map(|p| p.0), self.x.step, LEFT, RIGHT)?;
        let y = Scale::of(points().map(|p| p.1), self.y.step, BOTTOM, TOP)?;
        let mut svg = String::new();
        // Writing to a string cannot fail.
        let _ = self.draw(&mut svg, &x, &y);
        Some(svg)
    }

    fn draw(&self, svg: &mut String, x: &Scale, y: &Scale) -> std::fmt::Result {
        writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"26\" font-size=\"15\" font-weight=\"bold\">{}</text>",
            escaped(&self.title)
        )?;
        for value in x.grid() {
            let at = x.place(value);
            writeln!(
                svg,
                "<path d=\"M{at:.1} {TOP}V{BOTTOM}\" stroke=\"#ddd\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                BOTTOM + 18.0,
                escaped(&(self.x.show)(value))
            )?;
        }
        for value in y.grid() {
            let at = y.place(value);
            writeln!(
                svg,
                "<path d=\"M{LEFT} {at:.1}H{RIGHT}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                at + 4.0,
                escaped(&(self.y.show)(value))
            )?;
        }
        let (middle, centre) = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
        writeln!(
            svg,
            "<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke=\"#222\"/>\n\
             <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(18 {centre}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 18.0,
            escaped(&self.x.title),
            escaped(&self.y.title)
        )?;
        for (n, line) in self.lines.iter().enumerate() {
            let colour = COLOURS.get(n % COLOURS.len()).copied().unwrap_or("#000");
            let dash = if line.dashed {
                " stroke-dasharray=\"5 4\""
            } else {
                ""
            };
            let places: Vec<String> = line
                .points
                .iter()
                .filter(is_shown)
                .map(|point| format!("{:.1},{:.1}", x.place(point.0), y.place(point.1)))
                .collect();
            writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
                places.join(" ")
            )?;
            for place in &places {
                if let Some((x, y)) = place.split_once(',') {
                    writeln!(
                        svg,
                        "<circle cx=\"{x}\" cy=\"{y}\" r=\"2.5\" fill=\"{colour}\"/>"
                    )?;
                }
            }
            let at = TOP + 10.0 + 19.0 * n as f64;
            writeln!(
                svg,
                "<path d=\"M{} {at}h22\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>\
                 <text x=\"{}\" y=\"{}\">{}</text>",
                RIGHT + 14.0,
                RIGHT + 42.0,
                at + 4.0,
                escaped(&line.name)
            )?;
        }
        writeln!(svg, "</svg>")
    }
}

fn is_shown(point: &&(f64, f64)) -> bool {
    point.0 > 0.0 && point.1 > 0.0 && point.0.is_finite() && point.1.is_finite()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Nanoseconds in the unit that fits.
pub fn nanoseconds(value: f64) -> String {
    let (value, unit) = match value {
        v if v < 1e3 => (v, "ns"),
        v if v < 1e6 => (v / 1e3, "µs"),
        v if v < 1e9 => (v / 1e6, "ms"),
        v => (v / 1e9, "s"),
    };
    // Lines of the grid are powers of a step: rounded they are what they stand for.
    format!("{} {unit}", (value * 1e3).round() / 1e3)
}

/// Bytes in the unit that fits.
pub fn bytes(value: f64) -> String {
    crate::peers::run::size(value.round() as u64)
}

/// A number.
pub fn number(value: f64) -> String {
    match value {
        v if v < 1e3 => format!("{}", (v * 1e3).round() / 1e3),
        v if v < 1e6 => format!("{}k", (v / 1e3 * 1e3).round() / 1e3),
        v => format!("{}M", (v / 1e6 * 1e3).round() / 1e3),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn values_lie_where_their_logarithms_say() {
        let scale = Scale::of([3.0, 700.0].into_iter(), 10.0, 100.0, 400.0).unwrap();
        assert_eq!((scale.low, scale.high), (1.0, 1000.0));
        let near = |value: f64, place: f64| (scale.place(value) - place).abs() < 1e-9;
        assert!(near(1.0, 100.0) && near(10.0, 200.0) && near(1000.0, 400.0));
        assert!(near(10f64.sqrt(), 150.0));
        // Upwards on the page is downwards in its coordinates.
        let scale = Scale::of([1.0, 100.0].into_iter(), 10.0, 300.0, 0.0).unwrap();
        assert_eq!((scale.place(1.0), scale.place(100.0)), (300.0, 0.0));
    }

    #[test]
    fn the_grid_ends_where_the_values_do() {
        let scale = Scale::of([4096.0, 65536.0].into_iter(), 4.0, 0.0, 1.0).unwrap();
        let grid: Vec<u64> = scale.grid().iter().map(|at| at.round() as u64).collect();
        assert_eq!(grid, [4096, 16384, 65536]);
        let scale = Scale::of([8.0].into_iter(), 2.0, 0.0, 1.0).unwrap();
        assert_eq!(scale.grid().len(), 2);
        let scale = Scale::of([1.0, 2f64.powi(30)].into_iter(), 2.0, 0.0, 1.0).unwrap();
        assert!(scale.grid().len() <= 13);
        assert_eq!(Scale::of([0.0, f64::NAN].into_iter(), 2.0, 0.0, 1.0), None);
    }

    #[test]
    fn a_plot_has_its_lines_and_its_words_in_place() {
        let axis = |step| Axis {
            title: "a < b".to_owned(),
            step,
            show: number,
        };
        let line = Line {
            name: "ours".to_owned(),
            dashed: true,
            points: vec![(1.0, 10.0), (2.0, 0.0), (10.0, 1000.0)],
        };
        let plot = Plot {
            title: "R&D".to_owned(),
            x: axis(10.0),
            y: axis(10.0),
            lines: vec![line],
        };
        let svg = plot.svg().unwrap();
        assert!(svg.contains("points=\"84.0,398.0 560.0,44.0\""), "{svg}");
        assert!(svg.contains("R&amp;D") && svg.contains("a &lt; b"));
        assert!(svg.contains("stroke-dasharray"));
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(
            Plot {
                lines: Vec::new(),
                ..plot
            }
            .svg()
            .is_none()
        );
    }

    #[test]
    fn values_are_shown_in_units_that_fit() {
        assert_eq!(nanoseconds(10.0), "10 ns");
        assert_eq!(nanoseconds(1e5), "100 µs");
        assert_eq!(number(1e7), "10M");
        assert_eq!(bytes(4f64.powf(10.0)), "1M");
    }
}
