//! The picture of the house, `docs/house.svg`: floors, crates and the arrows between them, drawn from the
//! crate graph and compared with it by the part `crate-graph`.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context as _, ensure};

use crate::{
    cargo::Repository,
    graph::{self, House},
};

/// Where the picture is.
pub(crate) const PICTURE: &str = "docs/house.svg";

const WIDTH: u32 = 760;
const FLOOR: u32 = 92;
const BOX: (u32, u32) = (136, 44);
const LEFT: u32 = 40;
/// Colours of both themes, and words in them.
const STYLE: &str = "\
  text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
  .floor { font-size: 12px; fill: #656d76 }
  .crate { fill: #ddf4ff; stroke: #0969da }
  .line { stroke: #d0d7de; stroke-dasharray: 3 4 }
  .arrow { stroke: #57606a; fill: none }
  .head { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .floor { fill: #8d96a0 }
    .crate { fill: #0c2d6b; stroke: #58a6ff }
    .line { stroke: #30363d }
    .arrow { stroke: #9198a1 }
    .head { fill: #9198a1 }
  }
";

/// The command `cargo xtask house`.
pub(crate) fn command(repository: &Repository) -> anyhow::Result<bool> {
    let path = repository.root.join(PICTURE);
    fs::write(&path, draw(&graph::house(repository))).context(PICTURE)?;
    println!("{PICTURE} is drawn");
    Ok(true)
}

/// Fails when the picture shows another house.
pub(crate) fn check(repository: &Repository) -> anyhow::Result<()> {
    let there = fs::read_to_string(repository.root.join(PICTURE)).context(PICTURE)?;
    ensure!(
        there == draw(&graph::house(repository)),
        "{PICTURE} shows another house than the crates: `cargo xtask house` draws it anew"
    );
    Ok(())
}

/// The whole picture. Arrows that others imply are left out: whoever uses `ioas` reaches `runs` through it.
fn draw(house: &House) -> String {
    let top = house.floors.len() as u32;
    let height = top * FLOOR + 24;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>The house: a crate uses only crates of the floors below it</title>\n\
         <style>\n{STYLE}</style>\n\
         <defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" \
         markerHeight=\"7\" orient=\"auto\"><path class=\"head\" d=\"M0 0L8 4L0 8z\"/></marker></defs>\n"
    );
    let place = |name: &str| {
        let floor = house
            .floors
            .iter()
            .position(|floor| floor.contains(&name.to_owned()))?;
        let slots = house.floors.get(floor)?;
        let slot = slots.iter().position(|other| other == name)? as u32;
        let step = (WIDTH - 2 * LEFT) / slots.len() as u32;
        let x = LEFT + step * slot + step / 2;
        Some((x, (top - 1 - floor as u32) * FLOOR + 24))
    };
    for floor in 0..top {
        let y = (top - 1 - floor) * FLOOR + 24;
        let base = y + BOX.1 + 8;
        let _ = writeln!(
            svg,
            "<path class=\"line\" d=\"M8 {base}H{}\"/><text class=\"floor\" x=\"20\" y=\"{}\">{floor}</text>",
            WIDTH - 8,
            y + 27
        );
    }
    for (from, to) in house.needed() {
        let (Some((x, y)), Some((below_x, below_y))) = (place(from), place(to)) else {
            continue;
        };
        let path = if below_x == x || below_y - y <= FLOOR {
            let (start, end) = (y + BOX.1, below_y - 2);
            let middle = (start + end) / 2;
            format!("M{x} {start}C{x} {middle} {below_x} {middle} {below_x} {end}")
        } else {
            past(house, (x, y), (below_x, below_y), &place)
        };
        let _ = writeln!(
            svg,
            "<path class=\"arrow\" marker-end=\"url(#head)\" d=\"{path}\"/>"
        );
    }
    for name in house.floors.iter().flatten() {
        let Some((x, y)) = place(name) else { continue };
        let (left, short) = (
            x - BOX.0 / 2,
            name.strip_prefix("dmaspace-").unwrap_or(name),
        );
        let _ = writeln!(
            svg,
            "<rect class=\"crate\" x=\"{left}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"6\"/>\
             <text x=\"{x}\" y=\"{}\">{short}</text>",
            BOX.0,
            BOX.1,
            y + 27
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The way of an arrow past a floor: out of the side and down, or down and in at the side where a crate
/// stands above the end.
fn past(
    house: &House,
    (x, y): (u32, u32),
    (below_x, below_y): (u32, u32),
    place: &dyn Fn(&str) -> Option<(u32, u32)>,
) -> String {
    let crates = house.floors.iter().flatten();
    let above = crates
        .filter_map(|name| place(name))
        .any(|(other, floor)| other.abs_diff(below_x) < BOX.0 && y < floor && floor < below_y);
    let side = |of: u32, away: u32| {
        if away > of {
            of + BOX.0 / 2
        } else {
            of - BOX.0 / 2
        }
    };
    let half = BOX.1 / 2;
    if above {
        let (start, end, level) = (y + BOX.1, side(below_x, x), below_y + half);
        format!("M{x} {start}C{x} {level} {x} {level} {end} {level}")
    } else {
        let (start, level, end) = (side(x, below_x), y + half, below_y - 2);
        format!("M{start} {level}C{below_x} {level} {below_x} {level} {below_x} {end}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn house(arrows: &[(&str, &str)]) -> House {
        let floors = [&["a"][..], &["b"], &["c", "d"]];
        House {
            floors: floors
                .map(|floor| floor.iter().map(|name| (*name).into()).collect())
                .into(),
            arrows: arrows
                .iter()
                .map(|(from, to)| ((*from).into(), (*to).into()))
                .collect(),
        }
    }

    #[test]
    fn arrows_that_others_imply_are_left_out() {
        let house = house(&[("b", "a"), ("c", "a"), ("c", "b"), ("d", "a")]);
        let needed: Vec<_> = house.needed().collect();
        assert_eq!(needed, [("b", "a"), ("c", "b"), ("d", "a")]);
    }

    #[test]
    fn each_crate_and_each_arrow_is_drawn() {
        let (one, two) = (house(&[("b", "a")]), house(&[("b", "a"), ("c", "b")]));
        let (one, two) = (draw(&one), draw(&two));
        assert_ne!(one, two);
        assert_eq!(one.matches("marker-end").count(), 1);
        assert_eq!(two.matches("marker-end").count(), 2);
        for name in ["a", "b", "c", "d"] {
            assert!(two.contains(&format!(">{name}</text>")), "{name}");
        }
    }

    #[test]
    fn the_picture_is_that_of_the_crates() {
        check(&Repository::find().unwrap()).unwrap();
    }
}
