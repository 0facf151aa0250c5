//! Plots of figures as SVG inside a page: curves over sizes that double, and bars.
//!
//! Colours are classes of the page's style, so that light and dark are decided there.

use std::fmt::Write as _;

use crate::draw::svg::escape;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 270.0;
/// Room for the numbers of the axes.
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 12.0;
/// The most that a character takes on average, of the style's 12 pixels.
const CHARACTER: f64 = 7.0;

/// One curve, or one kind of bar.
pub(super) struct Series {
    /// For people.
    pub(super) name: String,
    /// Its colour: `c0` to `c3` of the style, and `old` for what others have published.
    pub(super) class: &'static str,
    /// Points, or the height of each bar by its place.
    pub(super) points: Vec<(f64, f64)>,
}

/// A logarithmic axis over whole powers of `base`.
struct Axis {
    base: f64,
    low: f64,
    high: f64,
}

impl Axis {
    /// Around these values, those that a logarithm has; `None` without any.
    fn around(base: f64, values: impl Iterator<Item = f64>) -> Option<Self> {
        let logs = values.filter(|value| value.is_finite() && *value > 0.0);
        let logs = logs.map(|value| value.log(base));
        let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), log| {
            (low.min(log), high.max(log))
        });
        // A power that is one but for rounding is that.
        let (low, high) = ((low + 1e-9).floor(), (high - 1e-9).ceil());
        let high = high.max(low + 1.0);
        low.is_finite().then_some(Self { base, low, high })
    }

    /// From 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let log = value.max(f64::MIN_POSITIVE).log(self.base);
        ((log - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// The powers between both ends, not more than `most`.
    fn ticks(&self, most: f64) -> impl Iterator<Item = f64> {
        let step = ((self.high - self.low) / most).ceil().max(1.0);
        let count = ((self.high - self.low) / step).floor() as u32;
        let (base, low) = (self.base, self.low);
        (0..=count).map(move |nth| base.powf(low + f64::from(nth) * step))
    }
}

/// Times over sizes; both axes are logarithmic. Empty without points.
pub(super) fn curves(title: &str, unit: &str, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|series| &series.points);
    let (Some(x), Some(y)) = (
        Axis::around(2.0, points().map(|point| point.0)),
        Axis::around(10.0, points().map(|point| point.1)),
    ) else {
        return String::new();
    };
    let (width, height) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let at = |value| LEFT + x.place(value) * width;
    let up = |value| TOP + (1.0 - y.place(value)) * height;
    let mut svg = begin(
        title,
        WIDTH,
        HEIGHT + 18.0 * series.len().div_ceil(2) as f64,
    );
    for tick in y.ticks(6.0) {
        let (line, number) = (up(tick), short(tick));
        let (end, text) = (WIDTH - RIGHT, line + 4.0);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{line:.1}\" x2=\"{end}\" y2=\"{line:.1}\"/>\
             <text x=\"{:.1}\" y=\"{text:.1}\" text-anchor=\"end\">{number}</text>",
            LEFT - 6.0
        );
    }
    for tick in x.ticks(6.0) {
        let label = crate::size::bytes(tick as u64).replace("iB", "");
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            at(tick),
            HEIGHT - BOTTOM + 18.0
        );
    }
    let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{unit}</text>", TOP - 8.0);
    for series in series {
        let mut path = String::new();
        for (nth, (size, time)) in series.points.iter().enumerate() {
            let step = if nth == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{step}{:.1} {:.1}", at(*size), up(*time));
        }
        if !path.is_empty() {
            let class = series.class;
            let _ = writeln!(svg, "<path class=\"curve {class}\" d=\"{path}\"/>");
        }
    }
    legend(&mut svg, series, HEIGHT);
    svg + "</svg>\n"
}

/// A group of bars for each of `names`; the axis is logarithmic, unless `linear`. Empty without bars.
pub(super) fn bars(
    title: &str,
    unit: &str,
    names: &[String],
    series: &[Series],
    linear: bool,
) -> String {
    const BAR: f64 = 11.0;
    const BARS: f64 = 234.0;
    const GAP: f64 = 8.0;
    let values = || series.iter().flat_map(|series| &series.points);
    let values = || values().map(|point| point.1);
    let Some(axis) = Axis::around(10.0, values()) else {
        return String::new();
    };
    let most = values().fold(0.0, f64::max);
    let long = |value: f64| match linear {
        true => value / most * BARS,
        // So that the shortest bar is seen.
        false => 4.0 + axis.place(value) * (BARS - 4.0),
    };
    let longest = names.iter().map(|name| name.chars().count()).max();
    let left = (longest.unwrap_or(0) as f64 * CHARACTER + 2.0 * GAP).max(170.0);
    let mut body = String::new();
    let mut top = TOP;
    for (nth, name) in names.iter().enumerate() {
        let of = |series: &Series| {
            let mut points = series.points.iter();
            points
                .find(|point| point.0 == nth as f64)
                .map(|point| (series.class, point.1))
        };
        let bars: Vec<_> = series.iter().filter_map(of).collect();
        let middle = top + bars.len() as f64 * BAR / 2.0 + 4.0;
        let _ = writeln!(
            body,
            "<text x=\"{:.1}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>",
            left - GAP,
            escape(name)
        );
        for (class, value) in bars {
            let (width, number) = (long(value), short(value));
            let _ = writeln!(
                body,
                "<rect class=\"bar {class}\" x=\"{left}\" y=\"{top:.1}\" width=\"{width:.1}\" \
                 height=\"{:.1}\"/><text class=\"small\" x=\"{:.1}\" y=\"{:.1}\">{number}</text>",
                BAR - 1.0,
                left + width + 4.0,
                top + BAR - 2.0
            );
            top += BAR;
        }
        top += 7.0;
    }
    let axis = if linear { "" } else { ", logarithmic" };
    let title = format!("{title}, {unit}{axis}");
    let height = top + 10.0 + 18.0 * series.len().div_ceil(2) as f64;
    let mut svg = begin(&title, left + BARS + 56.0, height);
    svg += &body;
    legend(&mut svg, series, top + 2.0);
    svg + "</svg>\n"
}

fn begin(title: &str, width: f64, height: f64) -> String {
    let title = escape(title);
    format!(
        "<svg viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<text class=\"head\" x=\"{LEFT}\" y=\"16\">{title}</text>\n"
    )
}

fn legend(svg: &mut String, series: &[Series], top: f64) {
    for (nth, series) in series.iter().enumerate() {
        let x = 16.0 + (nth % 2) as f64 * 220.0;
        let y = top + 2.0 + (nth / 2) as f64 * 18.0;
        let (class, name) = (series.class, escape(&series.name));
        let _ = writeln!(
            svg,
            "<rect class=\"bar {class}\" x=\"{x}\" y=\"{y:.1}\" width=\"12\" height=\"10\"/>\
             <text x=\"{}\" y=\"{:.1}\">{name}</text>",
            x + 18.0,
            y + 9.0
        );
    }
}

/// A number in few characters.
fn short(value: f64) -> String {
    match value {
        0.0..0.0995 => format!("{value:.3}"),
        value => crate::size::three_digits(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_reaches_from_power_to_power() {
        let axis = Axis::around(10.0, [0.3, 40.0, f64::NAN, 0.0].into_iter()).unwrap();
        assert_eq!((axis.low, axis.high), (-1.0, 2.0));
        assert!(axis.place(0.1) < 1e-12 && axis.place(100.0) == 1.0);
        assert!((axis.place(1.0) - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(
            axis.ticks(6.0).map(short).collect::<Vec<_>>().join(" "),
            "0.10 1.00 10.0 100"
        );
        let sizes = Axis::around(2.0, (12..=22).map(|log| f64::from(1 << log))).unwrap();
        assert_eq!((sizes.low, sizes.high), (12.0, 22.0));
        assert!(Axis::around(2.0, std::iter::empty()).is_none());
        // One value has an axis, too.
        let one = Axis::around(10.0, std::iter::once(10.0)).unwrap();
        assert!(one.high > one.low && one.place(10.0).is_finite());
    }

    #[test]
    fn nothing_to_draw_is_no_plot() {
        assert_eq!(curves("t", "µs", &[]), "");
        assert_eq!(bars("t", "ms", &[], &[], false), "");
    }

    #[test]
    fn the_longest_name_has_room_beside_its_bars() {
        let name = "4k-scattered, bitmap-records";
        let series = Series {
            name: "dmaspace".into(),
            class: "c1",
            points: vec![(0.0, 1.0)],
        };
        let svg = bars("inflate", "ms", &[name.into()], &[series], false);
        let number = |start: &str| -> f64 {
            let (_, rest) = svg.split_once(start).unwrap();
            rest.split('"').next().unwrap().parse().unwrap()
        };
        // It ends there, and begins at most so far to the left.
        let end = number("<text x=\"");
        assert!(end >= name.len() as f64 * CHARACTER, "{svg}");
        let bar = number("<rect class=\"bar c1\" x=\"");
        assert!(bar > end && number(" width=\"") >= bar + 234.0, "{svg}");
    }

    #[test]
    fn longer_bars_are_longer_times() {
        let series = |class: &'static str, value| Series {
            name: class.into(),
            class,
            points: vec![(0.0, value)],
        };
        let all = [series("c0", 100.0), series("c1", 1.0)];
        for (linear, widths) in [(false, ["234.0", "4.0"]), (true, ["234.0", "2.3"])] {
            let svg = bars("t", "ms", &["a<b".into()], &all, linear);
            for (class, width) in ["c0", "c1"].into_iter().zip(widths) {
                let bar = format!("<rect class=\"bar {class}\" x=\"170\"");
                let bar = svg.lines().find(|line| line.starts_with(&bar)).unwrap();
                assert!(bar.contains(&format!("width=\"{width}\"")), "{bar}");
            }
            assert!(svg.contains("a&lt;b"));
        }
    }
}
