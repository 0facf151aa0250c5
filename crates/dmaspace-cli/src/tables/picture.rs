//! Address spaces as a picture (SVG): a strip for each part that holes of more than all its contents set apart, all to
//! one scale, coloured by the size of leaves. Strips of the same part of several address spaces stand below each other.
//!
//! Written by hand as text, since it is a few rectangles. The style follows the reader's choice of light or dark.

use std::collections::BTreeMap;

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

impl Stretch {
    /// The end in 128 bits, since the last address may be the last of all.
    fn end(&self) -> u128 {
        u128::from(self.iova) + u128::from(self.len_bytes)
    }
}

/// An address space to draw: its name, empty if it needs none, and its leaves by address.
pub(super) type Space<'a> = (String, &'a [Stretch]);

/// Fonts and colours, light and dark. Viewers without variables show the light colour in front.
const STYLE: &str = "\
:root{color-scheme:light dark;--paper:#fff;--ink:#1b2126;--faint:#56616b;--empty:#e4e8eb}\n\
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e8ecef;--faint:#a3adb6;--empty:#2a3138}}\n\
text{font:12px system-ui,sans-serif;fill:#1b2126;fill:var(--ink)}.head{font-weight:600;font-size:15px}\
.faint{fill:#56616b;fill:var(--faint)}.iova{font-family:monospace}\n\
.paper{fill:#fff;fill:var(--paper)}.empty{fill:#e4e8eb;fill:var(--empty)}\n";

/// Colours of leaves of 4 KiB, 8 KiB and so on to 1 GiB: from red over green to violet, every second one lighter, so
/// that neighbours differ also to the colour-blind.
const COLOURS: [u32; 19] = [
    0xdc464b, 0xff8b66, 0xc0630e, 0xe19e2e, 0x907b00, 0xa7b32c, 0x528b06, 0x57c15b, 0x038e59,
    0x04c19f, 0x058b84, 0x0dbdc8, 0x02889e, 0x0ab9e9, 0x0684b9, 0x64affe, 0x3179ea, 0xb29dff,
    0xa85cc8,
];

// Lengths in units of the picture, which are pixels unless it is scaled.
const WIDTH: u32 = 960;
const MARGIN: u32 = 24;
const STRIP: u32 = WIDTH - 2 * MARGIN;
const STRIP_HEIGHT: u32 = 40;
/// Words above a strip, with the distance from the strip before.
const WORDS: u32 = 32;
/// Addresses below the last strip of a part.
const ADDRESSES: u32 = 22;
const HEAD: u32 = 56;
const LEGEND_COLUMN: u32 = 152;
const LEGEND_ROW: u32 = 24;

/// Columns of a strip in a unit of width. A column has one colour.
const COLUMNS: u32 = 2;
/// Columns of the shortest strip: fewer would not be seen.
const FEWEST_COLUMNS: usize = 6;
/// The most parts. The picture says how many are left out.
const MOST_PARTS: usize = 12;

/// The picture, with a title and a line below it.
pub(super) fn picture(title: &str, subtitle: &str, spaces: &[Space<'_>]) -> String {
    let parts = parts(spaces);
    let drawn = parts.get(..MOST_PARTS).unwrap_or(&parts);
    let subtitle = match parts.len() - drawn.len() {
        0 => subtitle.to_owned(),
        left => format!("{subtitle}; {} not drawn", counted(left as u64, "part")),
    };
    let widest = drawn.iter().map(|(first, end)| end - first).max();
    let mut body = String::new();
    let mut y = HEAD;
    for part in drawn {
        let share = (part.1 - part.0) as f64 / widest.unwrap_or(1) as f64;
        let columns = (f64::from(COLUMNS * STRIP) * share) as usize;
        let columns = columns.max(FEWEST_COLUMNS);
        for space in spaces {
            body += &strip(space, *part, columns, drawn.len() > 1, y);
            y += WORDS + STRIP_HEIGHT;
        }
        let end = MARGIN + columns as u32 / COLUMNS;
        body += &text("faint iova", MARGIN, y + 14, &format!("{:#x}", part.0));
        if end > 2 * LEGEND_COLUMN {
            let address = text("faint iova", end, y + 14, &format!("{:#x}", part.1));
            body += &address.replacen("<text", "<text text-anchor=\"end\"", 1);
        }
        y += ADDRESSES;
    }
    let (legend, style, bottom) = legend(spaces, y + MARGIN / 2);
    let height = bottom + MARGIN / 2;
    let title = escape(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{title}</title>\n<style>\n{STYLE}{style}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n{}{}{body}{legend}</svg>\n",
        text("head", MARGIN, 30, &title),
        text("faint", MARGIN, 50, &escape(&subtitle)),
    )
}

/// First addresses and ends of the parts of all spaces together.
fn parts(spaces: &[Space<'_>]) -> Vec<(u128, u128)> {
    let mapped = |(_, layout): &Space<'_>| layout.iter().map(|s| u128::from(s.len_bytes)).sum();
    let most: u128 = spaces.iter().map(mapped).max().unwrap_or(0);
    let all = spaces.iter().flat_map(|(_, layout)| layout.iter());
    let mut all: Vec<_> = all.map(|s| (u128::from(s.iova), s.end())).collect();
    all.sort_unstable();
    let mut parts: Vec<(u128, u128)> = Vec::new();
    for (first, end) in all {
        match parts.last_mut() {
            Some(part) if first.saturating_sub(part.1) <= most => part.1 = part.1.max(end),
            _ => parts.push((first, end)),
        }
    }
    parts
}

/// The strip of a part of an address space, with words above it.
fn strip(
    (name, layout): &Space<'_>,
    (first, end): (u128, u128),
    columns: usize,
    located: bool,
    y: u32,
) -> String {
    let inside = |s: &&Stretch| (first..end).contains(&s.iova.into());
    let layout: Vec<_> = layout.iter().filter(inside).collect();
    let span = u64::try_from(end - first).unwrap_or(u64::MAX);
    let place = format!("{first:#x} + {}", bytes(span));
    let names = [name.as_str(), if located { &place } else { "" }];
    let names: Vec<_> = names.into_iter().filter(|name| !name.is_empty()).collect();
    let names = names.join(", ");
    let leaves = sizes(layout.iter().copied()).into_iter();
    let leaves: Vec<_> = leaves
        .map(|(size, leaves)| format!("{} × {}", count(leaves), bytes(size)))
        .collect();
    let mut svg = text(
        "faint",
        MARGIN,
        y + WORDS - 6,
        &match names.as_str() {
            "" => leaves.join(", "),
            names => format!("{}: {}", escape(names), leaves.join(", ")),
        },
    );
    let rect = |class: &str, from: usize, to: usize| {
        let scale = |columns: usize| columns as f64 / f64::from(COLUMNS);
        format!(
            "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{STRIP_HEIGHT}\"/>\n",
            f64::from(MARGIN) + scale(from),
            y + WORDS,
            scale(to - from),
        )
    };
    svg += &rect("empty", 0, columns);
    let colours = colours(&layout, (first, end), columns);
    let mut at = 0;
    for same in colours.chunk_by(|one, next| one == next) {
        if let Some(Some(size)) = same.first() {
            svg += &rect(&class(*size), at, at + same.len());
        }
        at += same.len();
    }
    svg
}

/// For every column, the size of leaves to which most of what is mapped in it belongs.
fn colours(layout: &[&Stretch], (first, end): (u128, u128), columns: usize) -> Vec<Option<u64>> {
    let mut shares = vec![BTreeMap::<u64, f64>::new(); columns];
    let scale = columns as f64 / (end - first) as f64;
    for stretch in layout {
        let place = |address: u128| (address - first) as f64 * scale;
        let (left, right) = (place(stretch.iova.into()), place(stretch.end()));
        let inside = left as usize..(right.ceil() as usize).min(columns);
        for (column, sizes) in (inside.start..).zip(shares.get_mut(inside).unwrap_or_default()) {
            let share = right.min((column + 1) as f64) - left.max(column as f64);
            *sizes.entry(stretch.leaf_bytes).or_default() += share;
        }
    }
    let most = |sizes: BTreeMap<u64, f64>| sizes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let of = |sizes| most(sizes).map(|(size, _)| size);
    shares.into_iter().map(of).collect()
}

/// The legend, its part of the style, and where it ends.
fn legend(spaces: &[Space<'_>], top: u32) -> (String, String, u32) {
    let sizes = sizes(spaces.iter().flat_map(|(_, layout)| layout.iter()));
    let (mut svg, mut style, mut bottom) = (String::new(), String::new(), top);
    for (nth, size) in (0..).zip(sizes.into_keys()) {
        let a_row = STRIP / LEGEND_COLUMN;
        let (x, y) = (
            MARGIN + nth % a_row * LEGEND_COLUMN,
            top + nth / a_row * LEGEND_ROW,
        );
        let class = class(size);
        style += &format!(".{class}{{fill:{}}}\n", colour(size));
        svg += &format!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" rx=\"2\"/>\n"
        );
        svg += &text("", x + 22, y + 12, &format!("leaf of {}", bytes(size)));
        bottom = y + LEGEND_ROW;
    }
    (svg, style, bottom)
}

/// Leaves by their size.
fn sizes<'a>(layout: impl Iterator<Item = &'a Stretch>) -> BTreeMap<u64, u64> {
    let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
    for stretch in layout {
        let leaves = stretch.len_bytes.checked_div(stretch.leaf_bytes);
        let known = sizes.entry(stretch.leaf_bytes).or_default();
        *known = known.saturating_add(leaves.unwrap_or(0));
    }
    sizes
}

fn class(leaf_bytes: u64) -> String {
    format!("s{}", leaf_bytes.max(1).ilog2())
}

fn colour(leaf_bytes: u64) -> String {
    let place = leaf_bytes.max(1).ilog2().clamp(12, 30) - 12;
    format!("#{:06x}", COLOURS.get(place as usize).unwrap_or(&0))
}

fn text(class: &str, x: u32, y: u32, words: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{words}</text>\n")
}

/// Text as it stands between tags.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(iova: u64) -> Stretch {
        Stretch {
            iova,
            len_bytes: 8192,
            leaf_bytes: 4096,
        }
    }

    #[test]
    fn parts_far_from_each_other_have_strips_of_their_own() {
        let layout = [at(0), at(8192), at(1 << 40), at(1 << 46)];
        let svg = picture("far", "", &[("a<b".into(), &layout)]);
        assert_eq!(svg.matches("class=\"empty\"").count(), 3, "{svg}");
        for words in [
            ">a&lt;b, 0x0 + 16 KiB: 4 × 4 KiB<",
            ">a&lt;b, 0x10000000000 + 8 KiB: 2 × 4 KiB<",
            ">0x400000000000<",
        ] {
            assert!(svg.contains(words), "{words}: {svg}");
        }
        // To scale: the first part is twice as long.
        let widths = ["912", "456"].map(|width| {
            let strip = format!("class=\"s12\" x=\"24\" y=\"88\" width=\"{width}\"");
            let anywhere = format!("width=\"{width}\" height=\"40\"");
            (svg.contains(&strip), svg.matches(&anywhere).count())
        });
        assert_eq!(widths, [(true, 2), (false, 4)], "{svg}");
        let many: Vec<_> = (1..40).map(|n| at(n << 40)).collect();
        let svg = picture("far", "apart", &[(String::new(), &many)]);
        assert!(svg.contains(">apart; 27 parts not drawn<"), "{svg}");
    }

    #[test]
    fn address_spaces_stand_below_each_other_to_one_scale() {
        let (one, two) = ([at(0), at(8192)], [at(8192)]);
        let spaces = [("one".into(), &one[..]), ("two".into(), &two[..])];
        let svg = picture("both", "", &spaces);
        for words in [
            ">one: 4 × 4 KiB<",
            ">two: 2 × 4 KiB<",
            "<rect class=\"s12\" x=\"24\" y=\"88\" width=\"912\"",
            "<rect class=\"s12\" x=\"480\" y=\"160\" width=\"456\"",
        ] {
            assert!(svg.contains(words), "{words}: {svg}");
        }
        assert_eq!(svg.matches(">leaf of 4 KiB<").count(), 1, "{svg}");
    }

    #[test]
    fn a_narrow_stretch_is_seen_and_the_last_address_drawn() {
        let mut layout = [at(0), at(1 << 40), at(!8191)];
        layout[0].len_bytes = 1 << 39;
        let space = |layout: &[Stretch]| picture("", "", &[(String::new(), layout)]);
        assert!(space(&layout[..2]).contains("width=\"0.5\""));
        let svg = space(&layout);
        assert!(
            svg.contains(">0xffffffffffffe000 + 8 KiB: 2 × 4 KiB<"),
            "{svg}"
        );
        assert!(space(&[]).contains("</svg>"));
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

    /// Difference between two colours (CIE 1976).
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
