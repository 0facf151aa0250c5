//! A life as a picture: a column for the address space after each step, for each root, in the style of the
//! other [pictures](crate::draw::svg).

use std::collections::BTreeSet;

use crate::life::{Band, BandState, LifeReport, Moment};

use crate::draw::svg::{class, colour, escape, text};
use crate::map::clock::in_nanoseconds;
use crate::size::{bytes, count, duration};

const WIDTH: u32 = 960;
const MARGIN: u32 = 24;
/// Where columns begin, behind addresses.
const LEFT: u32 = 108;
const TOP: u32 = 72;
const PANEL: u32 = 208;
/// From one panel to the next, with its title.
const STEP: u32 = PANEL + 34;
/// Below the last panel: steps, times, legend.
const BELOW: u32 = 92;
/// What is narrower would not be seen.
const NARROWEST: f64 = 3.0;

/// The picture of a life as SVG 1.1.
pub(crate) fn draw(report: &LifeReport) -> String {
    // What is mapped begins with the roots.
    let moments: Vec<&Moment> = report.moments.iter().skip(1).collect();
    let panels = report.roots.len().max(1) as u32;
    let height = TOP + panels * STEP + BELOW;
    let title = format!(
        "One life of {}: {} in {} steps, every byte checked",
        bytes(report.memory.size_bytes),
        "two roots, devices that never stop",
        report.steps.len(),
    );
    let dma = &report.dma;
    let subtitle = format!(
        "{} accesses of devices, {} wrong bytes, {} faults outside the holes, {} in them; {}",
        count(dma.accesses),
        count(dma.wrong_bytes),
        count(dma.faults_outside_holes),
        count(dma.faults_in_holes),
        match report.left.is_nothing() {
            true => "nothing left",
            false => "something is left",
        }
    );
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" font-family=\"system-ui, sans-serif\" \
         font-size=\"13\">\n<title>{}</title>\n",
        escape(&title)
    );
    style(&mut svg, &sizes(&moments));
    svg += &format!("<rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n");
    let heading = "font-size=\"17\" font-weight=\"600\"";
    text(&mut svg, "ink", MARGIN, 30, heading, &escape(&title));
    text(&mut svg, "faint", MARGIN, 50, "", &escape(&subtitle));
    for (number, root) in (0u32..).zip(&report.roots) {
        let top = TOP + number * STEP + 22;
        let planned = match report.memory.second_node_planned && number == 1 {
            true => " (planned)",
            false => "",
        };
        let name = format!(
            "root on node {}{planned}: {}, for device {}",
            root.node, root.format, root.device
        );
        text(
            &mut svg,
            "ink",
            LEFT,
            top - 8,
            "font-weight=\"600\"",
            &escape(&name),
        );
        panel(&mut svg, report, &moments, number as usize, top);
    }
    let below = TOP + panels * STEP + 12;
    labels(&mut svg, report, &moments, below);
    legend(&mut svg, &moments, below + 46);
    svg + "</svg>\n"
}

fn column(moments: usize) -> f64 {
    f64::from(WIDTH - MARGIN - LEFT) / moments.max(1) as f64
}

fn sizes(moments: &[&Moment]) -> BTreeSet<u64> {
    let roots = moments.iter().flat_map(|moment| &moment.roots);
    let states = roots.flatten().map(|band| band.state);
    states
        .filter_map(|state| match state {
            BandState::Mapped { leaf_bytes } => Some(leaf_bytes),
            _ => None,
        })
        .collect()
}

fn style(svg: &mut String, sizes: &BTreeSet<u64>) {
    *svg += "<style>\n\
        .paper{fill:#ffffff}.ink{fill:#1b2126}.faint{fill:#56616b}.empty{fill:#eef1f3}\
        .tick{stroke:#8a949d}.hole{fill:#1b2126}.dirty{fill:#9b3fb5}.balloon{fill:#b4bec7}\n\
        @media (prefers-color-scheme: dark){\
        .paper{fill:#14181c}.ink{fill:#e8ecef}.faint{fill:#a3adb6}.empty{fill:#20262c}\
        .tick{stroke:#6b757e}.hole{fill:#ffffff}.dirty{fill:#c678dd}.balloon{fill:#56616b}}\n";
    for size in sizes {
        *svg += &format!(".{}{{fill:{}}}\n", class(*size), colour(*size));
    }
    *svg += "</style>\n";
}

fn panel(svg: &mut String, report: &LifeReport, moments: &[&Moment], root: usize, top: u32) {
    let (first, size) = (report.memory.iova, report.memory.size_bytes.max(1));
    let width = column(moments.len());
    for (at, moment) in moments.iter().enumerate() {
        let x = f64::from(LEFT) + at as f64 * width;
        rect(
            svg,
            "empty",
            x,
            f64::from(top),
            width - 3.0,
            f64::from(PANEL),
            "",
        );
        let bands = moment.roots.get(root).map_or(&[][..], Vec::as_slice);
        // Holes are drawn taller than they are, and so on top.
        let (holes, others): (Vec<&Band>, Vec<&Band>) =
            bands.iter().partition(|band| band.state == BandState::Hole);
        for band in others.into_iter().chain(holes) {
            let scale = f64::from(PANEL) / size as f64;
            let height = (band.len_bytes as f64 * scale).max(NARROWEST);
            // Low addresses at the bottom.
            let below = (band.iova.saturating_sub(first) + band.len_bytes) as f64 * scale;
            let y = f64::from(top + PANEL) - below.max(height);
            if let Some((class, what)) = drawn(band.state) {
                let end = band.iova + band.len_bytes;
                let hint = format!(
                    "after {}: {:#x} to {end:#x}: {what}",
                    moment.after, band.iova
                );
                rect(svg, &class, x, y, width - 3.0, height, &hint);
            }
        }
    }
    for part in 0..=2u32 {
        let iova = first + size / 2 * u64::from(part);
        let y = top + PANEL - PANEL / 2 * part;
        let (from, to) = (LEFT - 8, LEFT - 2);
        *svg +=
            &format!("<line class=\"tick\" x1=\"{from}\" y1=\"{y}\" x2=\"{to}\" y2=\"{y}\"/>\n");
        let attributes = "text-anchor=\"end\" font-family=\"monospace\" font-size=\"10\"";
        text(
            svg,
            "faint",
            LEFT - 10,
            y + 4,
            attributes,
            &format!("{iova:#x}"),
        );
    }
}

/// The class of a state, and a word for it.
fn drawn(state: BandState) -> Option<(String, String)> {
    match state {
        BandState::Absent => None,
        BandState::Mapped { leaf_bytes } => Some((
            class(leaf_bytes),
            format!("leaves of {}", bytes(leaf_bytes)),
        )),
        BandState::Dirty => Some(("dirty".into(), "dirty".into())),
        BandState::Hole => Some(("hole".into(), "a hole of 4 KiB".into())),
        BandState::Balloon => Some(("balloon".into(), "in the balloon".into())),
    }
}

fn rect(svg: &mut String, class: &str, x: f64, y: f64, width: f64, height: f64, hint: &str) {
    let place = format!(
        "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\""
    );
    *svg += &match hint {
        "" => format!("{place}/>\n"),
        hint => format!("{place}><title>{}</title></rect>\n", escape(hint)),
    };
}

/// The steps, and what each took.
fn labels(svg: &mut String, report: &LifeReport, moments: &[&Moment], y: u32) {
    let width = column(moments.len());
    for (at, moment) in moments.iter().enumerate() {
        let x = (f64::from(LEFT) + (at as f64 + 0.5) * width - 1.5) as u32;
        let attributes = "text-anchor=\"middle\" font-size=\"10\"";
        text(svg, "ink", x, y, attributes, moment.after.name());
        let step = report.steps.iter().find(|step| step.step == moment.after);
        if let Some(step) = step {
            text(
                svg,
                "faint",
                x,
                y + 14,
                attributes,
                &duration(in_nanoseconds(step.took)),
            );
        }
    }
}

fn legend(svg: &mut String, moments: &[&Moment], y: u32) {
    let sizes = sizes(moments);
    // Sizes in between are shown by their neighbours.
    let shown = sizes
        .iter()
        .map(|size| BandState::Mapped { leaf_bytes: *size });
    let others = [BandState::Hole, BandState::Dirty, BandState::Balloon];
    let all: Vec<_> = shown.chain(others).filter_map(drawn).collect();
    for (at, (class, what)) in (0u32..).zip(&all) {
        let x = MARGIN + at % 7 * 131;
        let y = y + at / 7 * 20;
        rect(svg, class, f64::from(x), f64::from(y - 11), 13.0, 13.0, "");
        text(svg, "ink", x + 19, y, "font-size=\"12\"", &escape(what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::life::samples::small;

    #[test]
    fn every_state_is_drawn_in_each_root_and_explained() {
        let svg = draw(&small());
        // Five bands that are there, in two roots, and their colours in the legend.
        for class in ["s12", "s20", "hole", "balloon", "dirty"] {
            let drawn = svg.matches(&format!("<rect class=\"{class}\"")).count();
            assert_eq!(drawn, 3, "{class}: {svg}");
        }
        assert!(svg.contains("prefers-color-scheme: dark"));
        assert!(
            svg.contains("root on node 1 (planned): amdv1, for device 02:00.0"),
            "{svg}"
        );
        assert!(svg.contains("after cut a hole: 0x10000080000 to 0x100000c0000: a hole of 4 KiB"));
        assert_eq!(
            svg.matches("<title>").count(),
            svg.matches("</title>").count()
        );
    }
}
