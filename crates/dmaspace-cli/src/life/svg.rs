//! A life as a picture: a column for the address space after each step, for each root, and time to scale below,
//! in the style of the other [pictures](crate::draw::svg).

use std::collections::BTreeSet;

use crate::life::{Band, BandState, LifeReport, Moment};

use crate::draw::svg::{MARGIN, WIDTH, begin, class, colour, escape, rect, text};
use crate::map::clock::in_nanoseconds;
use crate::size::{bytes, count, duration};

/// Where columns begin, behind addresses.
const LEFT: u32 = 108;
const TOP: u32 = 72;
const PANEL: u32 = 208;
/// From one panel to the next, with its title.
const STEP: u32 = PANEL + 34;
/// From the columns to the steps of the bar of time.
const LINES: u32 = 26;
/// The bars of time.
const TIME: u32 = LINES + 66;
/// Below the last panel: steps, times, legend.
const BELOW: u32 = 92 + TIME;
/// What is narrower would not be seen.
const NARROWEST: f64 = 3.0;

/// The picture of a life as SVG 1.1.
pub(crate) fn draw(report: &LifeReport) -> String {
    let moments: Vec<&Moment> = report.moments.iter().collect();
    let panels = report.roots.len().max(1) as u32;
    let height = TOP + panels * STEP + BELOW;
    let title = format!(
        "One life of {} in {} steps: two roots, devices that never stop, every byte checked",
        bytes(report.memory.size_bytes),
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
    let mut svg = begin(height, &title, &subtitle, &style(&sizes(&moments)));
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
    time(&mut svg, report, &moments, below + 18);
    legend(&mut svg, &moments, below + TIME + 46);
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

/// What the states and sizes add to the style of all.
fn style(sizes: &BTreeSet<u64>) -> String {
    let states = "\
        .hole{fill:#1b2126}.dirty{fill:#d6249f}.balloon{fill:#b4bec7}.even{fill:#c3d5e6}.odd{fill:#9dbbd6}\n\
        @media (prefers-color-scheme: dark){\
        .hole{fill:#ffffff}.dirty{fill:#f064c4}.balloon{fill:#56616b}.even{fill:#34506b}.odd{fill:#4b6d8e}}\n";
    let sizes = sizes.iter();
    let sizes = sizes.map(|size| format!(".{}{{fill:{}}}\n", class(*size), colour(*size)));
    states.to_owned() + &sizes.collect::<String>()
}

fn panel(svg: &mut String, report: &LifeReport, moments: &[&Moment], root: usize, top: u32) {
    let (first, size) = (report.memory.iova, report.memory.size_bytes.max(1));
    let width = column(moments.len());
    for (at, moment) in moments.iter().enumerate() {
        let x = f64::from(LEFT) + at as f64 * width;
        *svg += &rect("empty", [x, top.into(), width - 3.0, PANEL.into()], "");
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
                *svg += &rect(&class, [x, y, width - 3.0, height], &hint);
            }
        }
    }
    for part in 0..=2u32 {
        let iova = first + size / 2 * u64::from(part);
        let y = top + PANEL - PANEL / 2 * part;
        let (from, to) = (LEFT - 8, LEFT - 2);
        *svg +=
            &format!("<line class=\"tick\" x1=\"{from}\" y1=\"{y}\" x2=\"{to}\" y2=\"{y}\"/>\n");
        let attributes = "text-anchor=\"end\" font-family=\"monospace\"";
        text(
            svg,
            "small faint",
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
        BandState::Mapped { leaf_bytes } => {
            Some((class(leaf_bytes), format!("{} leaves", bytes(leaf_bytes))))
        }
        BandState::Dirty => Some(("dirty".into(), "dirty".into())),
        BandState::Hole => Some(("hole".into(), "a hole of 4 KiB".into())),
        BandState::Balloon => Some(("balloon".into(), "in the balloon".into())),
    }
}

/// The steps, and what each took.
fn labels(svg: &mut String, report: &LifeReport, moments: &[&Moment], y: u32) {
    let width = column(moments.len());
    for (at, moment) in moments.iter().enumerate() {
        let x = (f64::from(LEFT) + (at as f64 + 0.5) * width - 1.5) as u32;
        let attributes = "text-anchor=\"middle\"";
        text(svg, "small", x, y, attributes, moment.after.name());
        let step = report.steps.iter().find(|step| step.step == moment.after);
        if let Some(step) = step {
            text(
                svg,
                "small faint",
                x,
                y + 14,
                attributes,
                &duration(in_nanoseconds(step.took)),
            );
        }
    }
}

/// Time to scale: the steps after each other, each below its column, and then all of the life.
fn time(svg: &mut String, report: &LifeReport, moments: &[&Moment], y: u32) {
    let width = column(moments.len());
    let took: Vec<(&str, u64)> = moments
        .iter()
        .filter_map(|moment| {
            let mut steps = report.steps.iter();
            let step = steps.find(|step| step.step == moment.after)?;
            Some((moment.after.name(), in_nanoseconds(step.took)))
        })
        .collect();
    let ends = bar(svg, "steps", &took, y + LINES);
    for (at, (from, to)) in ends.iter().enumerate() {
        let x = f64::from(LEFT) + (at as f64 + 0.5) * width - 1.5;
        let (middle, top) = (f64::midpoint(*from, *to), y + LINES);
        *svg += &format!(
            "<line class=\"tick\" x1=\"{x:.2}\" y1=\"{y}\" x2=\"{middle:.2}\" y2=\"{top}\"/>\n"
        );
    }
    let times = &report.times;
    let all = [
        ("steps", times.steps_ns),
        ("devices", times.waited_ns),
        ("picture", times.drawn_ns),
        ("freeing", times.freed_ns),
        ("rest", times.rest_ns),
    ];
    bar(svg, "all", &all, y + LINES + 34);
    let words = all.map(|(name, ns)| format!("{name} {}", duration(ns)));
    text(
        svg,
        "small faint",
        LEFT,
        y + LINES + 66,
        "",
        &words.join(", "),
    );
}

/// Times after each other, to scale, with their names where there is room; where each begins and ends.
fn bar(svg: &mut String, name: &str, parts: &[(&str, u64)], y: u32) -> Vec<(f64, f64)> {
    let total = parts.iter().map(|part| part.1).sum::<u64>();
    let scale = f64::from(WIDTH - MARGIN - LEFT) / total.max(1) as f64;
    let label = format!("{name}, {}", duration(total));
    let attributes = "text-anchor=\"end\"";
    text(svg, "small faint", LEFT - 8, y + 13, attributes, &label);
    let mut x = f64::from(LEFT);
    let mut ends = Vec::new();
    for (nth, (name, ns)) in parts.iter().enumerate() {
        let width = *ns as f64 * scale;
        let class = if nth % 2 == 0 { "even" } else { "odd" };
        let hint = format!("{name}: {}", duration(*ns));
        *svg += &rect(class, [x, y.into(), width, 18.0], &hint);
        if width > 6.0 * name.len() as f64 + 8.0 {
            text(svg, "small", x as u32 + 4, y + 13, "", name);
        }
        ends.push((x, x + width));
        x += width;
    }
    ends
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
        *svg += &rect(class, [x.into(), (y - 11).into(), 13.0, 13.0], "");
        text(svg, "ink", x + 19, y, "", &escape(what));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::life::samples::small;

    #[test]
    fn steps_have_a_column_each_and_times_are_to_scale() {
        let mut report = small();
        report.steps[0].took = Duration::from_secs(3);
        report.steps[1].took = Duration::from_secs(1);
        report.times.steps_ns = 4_000_000_000;
        report.times.waited_ns = 12_000_000_000;
        let svg = draw(&report);
        let room = f64::from(WIDTH - MARGIN - LEFT);
        for (name, part) in [
            ("memory: 3.00 s", 0.75),
            ("cut a hole: 1.00 s", 0.25),
            ("steps: 4.00 s", 0.25),
            ("devices: 12.0 s", 0.75),
        ] {
            let rect = format!(
                "width=\"{:.2}\" height=\"18.00\"><title>{name}<",
                room * part
            );
            assert!(svg.contains(&rect), "{rect}: {svg}");
        }
        // Two columns of each root, and the lines to the bar from each.
        assert_eq!(svg.matches("class=\"empty\"").count(), 4);
        assert_eq!(svg.matches("<line class=\"tick\"").count(), 2 + 2 * 3);
    }

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
