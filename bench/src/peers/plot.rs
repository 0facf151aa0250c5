//! Plots as SVG: curves over two logarithmic axes.
//!
//! Ours and not `plotters`, which has no style sheet, so that its colours cannot follow the reader's choice of light or
//! dark.

use std::fmt::Write as _;

/// Fonts and colours, light and dark. Viewers without variables show the light colour in front; curves have none.
const STYLE: &str = "\
:root{color-scheme:light dark;--paper:#fff;--ink:#1b2126;--faint:#56616b;--line:#d5dbe0;--empty:#e4e8eb;\
--old:#8a949d;--c0:#d44d32;--c1:#2b9f8e;--c2:#e6a82e;--c3:#476fc4}\n\
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e8ecef;--faint:#a3adb6;\
--line:#38424b;--empty:#2a3138;--old:#7d8891;--c0:#ec7a62;--c1:#46b8a8;--c2:#f0bf5c;--c3:#7f9fe6}}\n\
:root{--c4:#cc79a7;--c5:#56b4e9;--c6:#9b6fd0;--c7:#b07a3c;--c8:#6aa84f}\n\
svg{font:12px system-ui,sans-serif}svg text,.ink{fill:#1b2126;fill:var(--ink)}\
svg .head{font-weight:600;font-size:15px}svg .faint{fill:#56616b;fill:var(--faint)}svg .small{font-size:10px}\n\
.paper{fill:#fff;fill:var(--paper)}.empty{fill:#e4e8eb;fill:var(--empty)}\
.grid{stroke:#d5dbe0;stroke:var(--line)}.tick{stroke:#8a949d;stroke:var(--old)}\n\
.curve,.dots{fill:none;stroke:var(--of);stroke-width:2}\
.dots{stroke-width:5;stroke-linecap:round}.curve.dashed{stroke-dasharray:5 4}.bar{fill:var(--of)}\n\
.old{--of:var(--old)}.c0{--of:var(--c0)}.c1{--of:var(--c1)}.c2{--of:var(--c2)}.c3{--of:var(--c3)}\
.c4{--of:var(--c4)}.c5{--of:var(--c5)}.c6{--of:var(--c6)}.c7{--of:var(--c7)}.c8{--of:var(--c8)}\n";

/// The colours of [`STYLE`], in the order in which lines take them.
pub(crate) const COLOURS: [&str; 10] =
    ["c1", "c0", "c3", "c2", "c4", "c5", "c6", "c7", "c8", "old"];

/// Lines over two logarithmic axes.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    /// The title.
    pub(crate) title: String,
    /// The horizontal axis.
    pub(crate) x: Axis,
    /// The vertical axis.
    pub(crate) y: Axis,
    /// The lines.
    pub(crate) lines: Vec<Line>,
}

/// A logarithmic axis.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    /// The title, with the unit.
    pub(crate) title: String,
    /// The axis ends at powers of this, and so do its parts.
    pub(crate) step: f64,
    /// A value as it stands at the axis.
    pub(crate) show: fn(f64) -> String,
}

/// A line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// The name.
    pub(crate) name: String,
    /// One of [`COLOURS`].
    pub(crate) colour: &'static str,
    /// Dashed: a limit, or what others have measured.
    pub(crate) dashed: bool,
    /// Points from left to right, of which those that are not positive are left out.
    pub(crate) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 270.0;
/// Room for the numbers of the axes.
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 46.0;
const RIGHT: f64 = 12.0;
/// Parts of an axis at most.
const PARTS: f64 = 8.0;
/// The most that a character takes on average, of the style's 12 pixels.
const CHARACTER: f64 = 7.0;
/// Half of a row of the legend.
const COLUMN: f64 = 220.0;

impl Plot {
    /// The picture as a file; `None` without a point.
    pub(crate) fn svg(&self) -> Option<String> {
        let points = || self.lines.iter().flat_map(|line| line.shown());
        let x = Scale::around(self.x.step, points().map(|point| point.0))?;
        let y = Scale::around(self.y.step, points().map(|point| point.1))?;
        let at = |value| LEFT + x.place(value) * (WIDTH - LEFT - RIGHT);
        let up = |value| TOP + (1.0 - y.place(value)) * (HEIGHT - TOP - BOTTOM);
        let (title, height) = (escape(&self.title), HEIGHT + legend_height(&self.lines));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
             <style>\n{STYLE}</style>\n<rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
             <title>{title}</title>\n<text class=\"head\" x=\"{LEFT}\" y=\"16\">{title}</text>\n"
        );
        for value in y.parts() {
            let (line, number) = (up(value), escape(&(self.y.show)(value)));
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {line:.1}H{}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{number}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                line + 4.0
            );
        }
        for value in x.parts() {
            let (place, number) = (at(value), escape(&(self.x.show)(value)));
            let (line, below) = (HEIGHT - BOTTOM, HEIGHT - BOTTOM + 18.0);
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{place:.1} {TOP}V{line}\"/>\
                 <text x=\"{place:.1}\" y=\"{below}\" text-anchor=\"middle\">{number}</text>"
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"4\" y=\"{}\">{}</text><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            TOP - 10.0,
            escape(&self.y.title),
            WIDTH - RIGHT,
            HEIGHT - 4.0,
            escape(&self.x.title)
        );
        for line in &self.lines {
            let places = line
                .shown()
                .map(|(x, y)| format!("{:.1} {:.1}", at(x), up(y)));
            let places: Vec<String> = places.collect();
            let dots: String = places.iter().map(|place| format!("M{place}h0")).collect();
            let (colour, dashed) = (line.colour, if line.dashed { " dashed" } else { "" });
            let _ = writeln!(
                svg,
                "<path class=\"curve {colour}{dashed}\" d=\"M{}\"/><path class=\"dots {colour}\" d=\"{dots}\"/>",
                places.join("L")
            );
        }
        legend(&mut svg, &self.lines, HEIGHT);
        Some(svg + "</svg>\n")
    }
}

impl Line {
    fn shown(&self) -> impl Iterator<Item = (f64, f64)> {
        let shown = |value: f64| value > 0.0 && value.is_finite();
        let points = self.points.iter().copied();
        points.filter(move |point| shown(point.0) && shown(point.1))
    }
}

/// Names in a row of the legend: one where a name does not fit into half of it.
fn per_row(lines: &[Line]) -> usize {
    let longest = lines.iter().map(|line| line.name.chars().count()).max();
    match longest.unwrap_or(0) as f64 * CHARACTER + 18.0 <= COLUMN {
        true => 2,
        false => 1,
    }
}

fn legend_height(lines: &[Line]) -> f64 {
    18.0 * lines.len().div_ceil(per_row(lines)) as f64
}

fn legend(svg: &mut String, lines: &[Line], top: f64) {
    let per_row = per_row(lines);
    for (nth, line) in lines.iter().enumerate() {
        let x = 16.0 + (nth % per_row) as f64 * COLUMN;
        let y = top + 2.0 + (nth / per_row) as f64 * 18.0;
        let _ = writeln!(
            svg,
            "<rect class=\"bar {}\" x=\"{x}\" y=\"{y:.1}\" width=\"12\" height=\"10\"/>\
             <text x=\"{}\" y=\"{:.1}\">{}</text>",
            line.colour,
            x + 18.0,
            y + 9.0,
            escape(&line.name)
        );
    }
}

/// Text as it stands between tags.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// A logarithmic axis over whole powers of `step`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scale {
    step: f64,
    low: f64,
    high: f64,
}

impl Scale {
    /// Around these values, those that a logarithm has; `None` without any.
    fn around(step: f64, values: impl Iterator<Item = f64>) -> Option<Self> {
        let logs = values.filter(|value| value.is_finite() && *value > 0.0);
        let logs = logs.map(|value| value.log(step));
        let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), log| {
            (low.min(log), high.max(log))
        });
        // A power that is one but for rounding is that.
        let (low, high) = ((low + 1e-9).floor(), (high - 1e-9).ceil());
        let high = high.max(low + 1.0);
        low.is_finite().then_some(Self { step, low, high })
    }

    /// From 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let log = value.max(f64::MIN_POSITIVE).log(self.step);
        ((log - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// The powers at which it is divided.
    fn parts(&self) -> impl Iterator<Item = f64> {
        let every = ((self.high - self.low) / PARTS).ceil().max(1.0);
        let count = ((self.high - self.low) / every).floor() as u32;
        let Self { step, low, .. } = *self;
        (0..=count).map(move |nth| step.powf(low + f64::from(nth) * every))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
