//! The figures as tables.

use std::fmt::Write as _;

use super::{
    Figures, KINDS, SIZES, Subject,
    profile::{Layer, Profile},
};

/// Names of units as columns.
const NAMES: [&str; KINDS.len()] = ["VT-d", "AMD-Vi", "SMMUv3", "RISC-V", "SMMUv2"];

/// A figure with a comma for thousands.
fn number(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn pair(of: Option<&[Profile; 2]>, figure: impl Fn(&Profile) -> f64) -> String {
    match of {
        Some(both) => both.each_ref().map(|one| number(figure(one))).join("/"),
        None => String::new(),
    }
}

/// The tables of the document.
pub fn document(all: &[Figures]) -> String {
    let of = |subject, n: usize| {
        let mut found = all.iter().filter(|figures| figures.subject == subject);
        found.next().and_then(|figures| figures.sizes.get(n))
    };
    let mut text = String::from("| map/unmap |");
    for (nth, name) in NAMES.iter().enumerate() {
        let _ = write!(text, " {name}: table |");
        if nth == 0 {
            text += " software unit |";
        }
        text += " driver |";
    }
    text += "\n|---|";
    text += &"---|".repeat(2 * NAMES.len() + 1);
    for (n, size) in SIZES.iter().enumerate() {
        let _ = write!(text, "\n| {} |", size.name);
        for (kind, _) in KINDS {
            let _ = write!(
                text,
                " {} |",
                pair(of(Subject::Table(kind), n), |one| one.all)
            );
            if kind == KINDS[0].0 {
                let _ = write!(text, " {} |", pair(of(Subject::Software, n), |one| one.all));
            }
            let _ = write!(
                text,
                " {} |",
                pair(of(Subject::Driver(kind), n), |one| one.all)
            );
        }
    }
    for (kind, name) in KINDS
        .into_iter()
        .zip(NAMES)
        .map(|((kind, _), name)| (kind, name))
    {
        let _ = write!(text, "\n\n{name}, by layer:\n\n| map/unmap |");
        Layer::ALL.iter().for_each(|(_, layer)| {
            let _ = write!(text, " {layer} |");
        });
        text += "\n|---|";
        text += &"---|".repeat(Layer::ALL.len());
        for (n, size) in SIZES.iter().enumerate() {
            let _ = write!(text, "\n| {} |", size.name);
            for (layer, _) in Layer::ALL {
                let share = |one: &Profile| one.layers.get(&layer).copied().unwrap_or(0.0);
                let _ = write!(text, " {} |", pair(of(Subject::Driver(kind), n), share));
            }
        }
    }
    text + "\n"
}
