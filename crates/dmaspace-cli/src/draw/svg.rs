//! What all pictures are made of, and the address space as one: strips to one scale, coloured by the size of the
//! leaves. Without tables of our own there is nothing to draw.
//!
//! Written by hand as text, since it is a few rectangles: the crate `svg` would take a call for each attribute. The
//! style follows the reader's choice of light or dark. Warm colours are small leaves, cold ones large.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::Serialize;

use crate::json::hex;
use crate::size::{bytes, count, counted};

/// A stretch of an address space with leaves of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stretch {
    /// First device address.
    #[serde(with = "hex")]
    pub iova: u64,
    /// Length.
    pub len_bytes: u64,
    /// Size of its leaves.
    pub leaf_bytes: u64,
}

/// Fonts and colours of all pictures, light and dark. Viewers without variables show the light colour in front.
pub(crate) const STYLE: &str = "\
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

/// All lengths are in units of the picture, which are pixels unless it is scaled.
pub(crate) const WIDTH: u32 = 960;
pub(crate) const MARGIN: u32 = 24;
pub(crate) const STRIP: u32 = WIDTH - 2 * MARGIN;
const STRIP_TOP: u32 = 68;
const STRIP_HEIGHT: u32 = 56;
const LABELS: u32 = 4;
/// Columns of an address.
const LABEL: u32 = 150;
/// The name of a part above its strip.
const NAME: u32 = 18;
/// A strip narrower than this would not be seen.
const NARROWEST_STRIP: f64 = 3.0;
const LEGEND_TOP: u32 = STRIP_TOP + STRIP_HEIGHT + 56;
const LEGEND_COLUMN: u32 = 228;
const LEGEND_COLUMNS: u32 = 4;
const LEGEND_ROW: u32 = 24;

/// A stretch narrower than this would not be seen.
const NARROWEST: f64 = 0.75;
/// More stretches than this are drawn as columns instead: no eye tells them apart, and the file
/// stays small.
const MOST_STRETCHES: usize = 2 * STRIP as usize;

/// More strips than this are not drawn; the picture says how much is left out.
const MOST_STRIPS: usize = 12;
/// From one strip to the next, with its labels.
const STRIP_STEP: u32 = STRIP_HEIGHT + 40;

/// A picture with a title, a line below it, and what lies where: a strip for each part of the
/// address space that holes of more than all its contents set apart, all to the same scale. `contents` says in words
/// what lies in a range of addresses, from the first to the last one; empty if that is not known.
pub(crate) fn picture(
    title: &str,
    subtitle: &str,
    layout: &[Stretch],
    contents: impl Fn(RangeInclusive<u64>) -> String,
) -> String {
    let sizes = leaves_by_size(layout);
    let parts = parts(layout);
    let drawn = parts.get(..MOST_STRIPS).unwrap_or(&parts);
    // One part needs no name: the title is its name.
    let named = if drawn.len() > 1 { NAME } else { 0 };
    let more = (STRIP_STEP + named) * (drawn.len().max(1) as u32 - 1) + named;
    let rows = (sizes.len() as u32).div_ceil(LEGEND_COLUMNS).max(1);
    let height = LEGEND_TOP + more + rows * LEGEND_ROW + MARGIN / 2;
    let subtitle = match parts.len() - drawn.len() {
        0 => subtitle.to_owned(),
        left => format!("{subtitle}; {} not drawn", counted(left as u64, "part")),
    };
    let colours = sizes.keys();
    let colours = colours.map(|size| format!(".{}{{fill:{}}}\n", class(*size), colour(*size)));
    let mut svg = begin(height, title, &subtitle, &colours.collect::<String>());
    let widest = drawn.iter().map(|part| extent(part).1).max().unwrap_or(0);
    for (nth, part) in (0..).zip(drawn) {
        let top = STRIP_TOP + named + nth * (STRIP_STEP + named);
        if named > 0 {
            name(&mut svg, part, top - 6, &contents);
        }
        strip(&mut svg, part, top, widest);
    }
    if drawn.is_empty() {
        svg += &strip_rect("empty", STRIP_TOP, MARGIN.into(), STRIP.into(), "");
    }
    legend(&mut svg, &sizes, LEGEND_TOP + more);
    svg += "</svg>\n";
    svg
}

/// Where a part is and what is in it.
fn name(
    svg: &mut String,
    part: &[Stretch],
    y: u32,
    contents: impl Fn(RangeInclusive<u64>) -> String,
) {
    let (first, span) = extent(part);
    let leaves = part.iter().map(leaves_of).fold(0, u64::saturating_add);
    let span = u64::try_from(span).unwrap_or(u64::MAX);
    let mut words = format!("{first:#x} + {}: {}", bytes(span), counted_leaves(leaves));
    let contents = contents(first..=first.saturating_add(span.saturating_sub(1)));
    if !contents.is_empty() {
        words = format!("{words}, {}", escape(&contents));
    }
    text(svg, "faint", MARGIN, y, "font-family=\"monospace\"", &words);
}

/// The first address of a part, and bytes to its end: in 128 bits, since the last address may be the last of all.
fn extent(part: &[Stretch]) -> (u64, u128) {
    let first = part.iter().map(|s| s.iova).min().unwrap_or(0);
    let end = part.iter().map(end).max().unwrap_or(0);
    (first, end.saturating_sub(u128::from(first)))
}

/// A picture of [`WIDTH`] and this height as far as its heading, with what `style` adds to that of all.
pub(crate) fn begin(height: u32, title: &str, subtitle: &str, style: &str) -> String {
    let (title, subtitle) = (escape(title), escape(subtitle));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{title}</title>\n<style>\n{STYLE}{style}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n"
    );
    text(&mut svg, "head", MARGIN, 30, "", &title);
    text(&mut svg, "faint", MARGIN, 50, "", &subtitle);
    svg
}

/// The layout in parts, where holes are longer than everything in it.
fn parts(layout: &[Stretch]) -> Vec<&[Stretch]> {
    let whole = layout.iter().map(|s| u128::from(s.len_bytes)).sum::<u128>();
    layout
        .chunk_by(|one, next| u128::from(next.iova).saturating_sub(end(one)) <= whole)
        .collect()
}

pub(crate) fn counted_leaves(number: u64) -> String {
    match number {
        1 => "1 leaf".into(),
        many => format!("{} leaves", count(many)),
    }
}

/// A part, as wide as it is beside the widest.
fn strip(svg: &mut String, layout: &[Stretch], top: u32, widest: u128) {
    let (first, span) = extent(layout);
    let width = match widest {
        0 => STRIP.into(),
        widest => (f64::from(STRIP) * span as f64 / widest as f64).max(NARROWEST_STRIP),
    };
    *svg += &strip_rect("empty", top, MARGIN.into(), width, "");
    if span == 0 {
        return;
    }
    let scale = width / span as f64;
    let place = |iova: u64| f64::from(MARGIN) + iova.saturating_sub(first) as f64 * scale;
    if layout.len() <= MOST_STRETCHES {
        let (narrow, wide): (Vec<_>, Vec<_>) = layout
            .iter()
            .partition(|s| s.len_bytes as f64 * scale < NARROWEST);
        // Narrow ones are drawn wider than they are, and so on top.
        for stretch in wide.into_iter().chain(narrow) {
            let wide = (stretch.len_bytes as f64 * scale).max(NARROWEST);
            let left = place(stretch.iova).min(f64::from(MARGIN) + width - wide);
            *svg += &strip_rect(&class(stretch.leaf_bytes), top, left, wide, &hint(stretch));
        }
    } else {
        for (column, size) in columns(layout, place) {
            *svg += &strip_rect(&class(size), top, f64::from(MARGIN + column), 1.0, "");
        }
    }
    labels(svg, top, first, span, width as u32);
}

/// For every column of the strip, the leaf size to which most of it belongs.
fn columns(layout: &[Stretch], place: impl Fn(u64) -> f64) -> Vec<(u32, u64)> {
    let mut shares: BTreeMap<u32, BTreeMap<u64, f64>> = BTreeMap::new();
    for stretch in layout {
        let left = place(stretch.iova) - f64::from(MARGIN);
        let right = place(stretch.iova.saturating_add(stretch.len_bytes)) - f64::from(MARGIN);
        let last = (right.ceil() as u32).min(STRIP);
        for column in left as u32..last {
            let inside = right.min(f64::from(column + 1)) - left.max(f64::from(column));
            *shares
                .entry(column)
                .or_default()
                .entry(stretch.leaf_bytes)
                .or_default() += inside;
        }
    }
    shares
        .into_iter()
        .filter_map(|(column, sizes)| {
            let most = sizes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
            most.map(|(size, _)| (column, size))
        })
        .collect()
}

fn labels(svg: &mut String, strip: u32, first: u64, span: u128, width: u32) {
    // As many as there is room for; a strip without any has a name above it.
    let parts = (width / LABEL).min(LABELS);
    for part in 0..=parts {
        if parts == 0 {
            return;
        }
        let iova = u128::from(first) + span * u128::from(part) / u128::from(parts);
        let x = MARGIN + width * part / parts;
        let (top, bottom) = (strip + STRIP_HEIGHT, strip + STRIP_HEIGHT + 6);
        *svg +=
            &format!("<line class=\"tick\" x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{bottom}\"/>\n");
        let anchor = match part {
            0 => "start",
            part if part == parts => "end",
            _ => "middle",
        };
        let attributes = format!("text-anchor=\"{anchor}\" font-family=\"monospace\"");
        text(
            svg,
            "faint",
            x,
            bottom + 16,
            &attributes,
            &format!("{iova:#x}"),
        );
    }
}

fn legend(svg: &mut String, sizes: &BTreeMap<u64, (u64, u64)>, top: u32) {
    for (at, (size, (leaves, total))) in (0..).zip(sizes) {
        let x = MARGIN + at % LEGEND_COLUMNS * LEGEND_COLUMN;
        let y = top + at / LEGEND_COLUMNS * LEGEND_ROW;
        *svg += &format!(
            "<rect class=\"{}\" x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" rx=\"2\"/>\n",
            class(*size)
        );
        let words = format!("{} × {} = {}", count(*leaves), bytes(*size), bytes(*total));
        text(svg, "ink", x + 22, y + 12, "", &words);
    }
}

/// Leaf size → leaves, and their bytes together, as they are laid out.
fn leaves_by_size(layout: &[Stretch]) -> BTreeMap<u64, (u64, u64)> {
    let mut sizes: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for stretch in layout {
        let (leaves, total) = sizes.entry(stretch.leaf_bytes).or_default();
        *leaves = leaves.saturating_add(leaves_of(stretch));
        *total = total.saturating_add(stretch.len_bytes);
    }
    sizes
}

fn leaves_of(stretch: &Stretch) -> u64 {
    stretch
        .len_bytes
        .checked_div(stretch.leaf_bytes)
        .unwrap_or(0)
}

fn end(stretch: &Stretch) -> u128 {
    u128::from(stretch.iova) + u128::from(stretch.len_bytes)
}

/// What a pointer over the stretch shows.
fn hint(stretch: &Stretch) -> String {
    format!(
        "{:#x} to {:#x}: {} of {}",
        stretch.iova,
        end(stretch),
        counted_leaves(leaves_of(stretch)),
        bytes(stretch.leaf_bytes)
    )
}

pub(crate) fn class(leaf_bytes: u64) -> String {
    format!("s{}", leaf_bytes.max(1).ilog2())
}

/// The colours of leaves of 4 KiB, 8 KiB and so on to 1 GiB: from red over green to violet, every second one
/// lighter, so that neighbours differ also to the colour-blind.
const COLOURS: [u32; 19] = [
    0xdc464b, 0xff8b66, 0xc0630e, 0xe19e2e, 0x907b00, 0xa7b32c, 0x528b06, 0x57c15b, 0x038e59,
    0x04c19f, 0x058b84, 0x0dbdc8, 0x02889e, 0x0ab9e9, 0x0684b9, 0x64affe, 0x3179ea, 0xb29dff,
    0xa85cc8,
];

pub(crate) fn colour(leaf_bytes: u64) -> String {
    let place = leaf_bytes.max(1).ilog2().clamp(12, 30) - 12;
    format!("#{:06x}", COLOURS.get(place as usize).unwrap_or(&0))
}

/// A rectangle, with what a pointer over it shows.
pub(crate) fn rect(class: &str, [x, y, width, height]: [f64; 4], hint: &str) -> String {
    let place = format!(
        "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\""
    );
    match hint {
        "" => format!("{place}/>\n"),
        hint => format!("{place}><title>{}</title></rect>\n", escape(hint)),
    }
}

fn strip_rect(class: &str, y: u32, x: f64, width: f64, hint: &str) -> String {
    rect(class, [x, y.into(), width, STRIP_HEIGHT.into()], hint)
}

pub(crate) fn text(svg: &mut String, class: &str, x: u32, y: u32, attributes: &str, words: &str) {
    let space = if attributes.is_empty() { "" } else { " " };
    *svg +=
        &format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{space}{attributes}>{words}</text>\n");
}

/// Text as it stands between tags.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_far_from_each_other_have_strips_of_their_own() {
        let at = |iova| Stretch {
            iova,
            len_bytes: 8192,
            leaf_bytes: 4096,
        };
        let layout = [at(0), at(8192), at(1 << 40), at(1 << 46)];
        let far = (1 << 40)..=(1 << 40) + 8191;
        let contents = |range| (range == far).then(|| "a<b".to_owned());
        let svg = picture("far", "", &layout, |range| {
            contents(range).unwrap_or_default()
        });
        assert_eq!(svg.matches("class=\"empty\"").count(), 3, "{svg}");
        assert!(
            svg.contains(">0x10000000000 + 8 KiB: 2 leaves, a&lt;b<"),
            "{svg}"
        );
        assert!(svg.contains(">0x400000000000 + 8 KiB: 2 leaves<"), "{svg}");
        // To scale: the first part is twice as long.
        let widths = ["912.00", "456.00"].map(|width| {
            let strip = format!("width=\"{width}\" height=\"56.00\"/>");
            svg.matches(&strip).count()
        });
        assert_eq!(widths, [1, 2], "{svg}");
        let many: Vec<_> = (1..40).map(|n| at(n << 40)).collect();
        assert!(
            picture("far", "apart", &many, |_| String::new())
                .contains(">apart; 27 parts not drawn<")
        );
    }

    /// CIE 1976 L*a*b* of a colour of sRGB (IEC 61966-2-1, white D65).
    fn lab(colour: u32) -> [f64; 3] {
        let [_, rgb @ ..] = colour.to_be_bytes();
        let [r, g, b] = rgb.map(|part| match f64::from(part) / 255.0 {
            dark @ ..=0.04045 => dark / 12.92,
            part => ((part + 0.055) / 1.055).powf(2.4),
        });
        let f = |t: f64| match t {
            ..=0.008_856 => t * 7.787 + 16.0 / 116.0,
            t => t.cbrt(),
        };
        let x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505);
        let y = f(0.2126 * r + 0.7152 * g + 0.0722 * b);
        let z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }

    /// The difference between two colours (CIE 1976).
    fn delta_e(one: u32, other: u32) -> f64 {
        let squares = lab(one).into_iter().zip(lab(other));
        squares.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn sizes_differ_in_colour_from_each_other_and_from_the_paper() {
        assert!((delta_e(0, 0xff_ffff) - 100.0).abs() < 0.1);
        // Paper and empty strips, light and dark.
        let grounds = [0xff_ffff, 0xe4_e8eb, 0x14_181c, 0x2a_3138];
        for (nth, one) in COLOURS.into_iter().enumerate() {
            for other in COLOURS.into_iter().take(nth).chain(grounds) {
                let differ = delta_e(one, other);
                assert!(differ >= 15.0, "{one:06x} {other:06x}: {differ:.1}");
            }
        }
        for ground in grounds.map(|ground| format!("#{ground:06x}")) {
            assert!(STYLE.replace("#fff;", "#ffffff;").contains(&ground));
        }
    }

    #[test]
    fn sizes_beyond_the_colours_have_the_first_and_the_last() {
        assert_eq!(colour(0), colour(4096));
        assert_eq!(colour(u64::MAX), colour(1 << 30));
    }
}
