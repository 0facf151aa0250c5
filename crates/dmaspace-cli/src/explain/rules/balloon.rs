//! Series of a balloon: whether the target will be reached, and when.

use std::collections::BTreeMap;

use super::super::facts::{Facts, Known, Point};
use super::super::finding::{Advice, Finding};

/// Memory that a guest keeps for itself; with less it has nothing to give, MiB.
const NEAR_NOTHING: u64 = 128;
const SOURCE: &str = "Virtual I/O Device (VIRTIO) 1.3, section 5.5.6 \"Device Operation\"; Linux drivers/virtio/virtio_balloon.c, update_balloon_size_func, fill_balloon";

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    let mut cases: BTreeMap<(usize, &str), Vec<&Known<Point>>> = BTreeMap::new();
    for point in &facts.series {
        cases
            .entry((point.evidence.place.file, &point.fact.case))
            .or_default()
            .push(point);
    }
    for ((file, case), mut points) in cases {
        points.sort_by(|a, b| a.fact.second.total_cmp(&b.fact.second));
        let targets = || {
            facts
                .targets
                .iter()
                .filter(|one| one.evidence.place.file == file)
        };
        let own = targets().find(|one| {
            one.fact
                .0
                .as_deref()
                .is_some_and(|name| name.eq_ignore_ascii_case(case))
        });
        let common = || {
            targets().find(|one| {
                // A word before the target that names no case.
                !facts.series.iter().any(|point| {
                    one.fact
                        .0
                        .as_deref()
                        .is_some_and(|name| name.eq_ignore_ascii_case(&point.fact.case))
                })
            })
        };
        let Some(target) = own.or_else(common) else {
            continue;
        };
        judge(case, &points, target.fact.1, found, &target.evidence);
    }
}

fn judge(
    case: &str,
    points: &[&Known<Point>],
    target: u64,
    found: &mut Vec<Finding>,
    evidence: &super::super::finding::Evidence,
) {
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return;
    };
    let gap = |point: &Point| point.actual.abs_diff(target);
    if points.len() < 2 || gap(&last.fact) == 0 {
        return;
    }
    // The rate of the last second: from the last point that is at least a second old.
    let before = points
        .iter()
        .rev()
        .find(|point| last.fact.second - point.fact.second >= 0.999)
        .unwrap_or(first);
    let seconds = last.fact.second - before.fact.second;
    if seconds <= 0.0 {
        return;
    }
    let progress = gap(&before.fact) as f64 - gap(&last.fact) as f64;
    let left = gap(&last.fact);
    let nothing = NEAR_NOTHING.max(last.fact.actual / 64);
    let full = last.fact.free <= nothing && last.fact.available <= 2 * nothing;
    let base = |cause| {
        Finding::likely(cause, SOURCE).evidence([evidence, &before.evidence, &last.evidence])
    };
    if progress <= 0.0 && full {
        found.push(
            base("balloon.guest-full")
                .say(format!(
                    "Case {case}: the balloon stands at {} MiB, {left} MiB from its target, and the guest has {} MiB free \
                     and {} MiB available: likely it has nothing left to give, and the target will not be reached.",
                    last.fact.actual, last.fact.free, last.fact.available
                ))
                .advise(Advice::text(format!(
                    "Set a target that leaves the guest its memory: {} MiB, or its present size.",
                    last.fact.actual
                ))),
        );
    } else if progress > 0.0 {
        let rate = progress / seconds;
        let time = left as f64 / rate;
        found.push(
            base("balloon.slow")
                .say(format!(
                    "Case {case}: the balloon still moves, {rate:.0} MiB a second in the last {seconds:.0} s: the {left} \
                     MiB to its target take likely about {time:.0} s more."
                ))
                .advise(Advice::text(format!("Wait about {time:.0} s, as long as the rate stays."))),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::{causes, of_text};

    #[test]
    fn a_guest_that_is_full_is_told_from_a_slow_one() {
        let full = of_text(
            "# target 4096\nA 0 1000 900 1200\nA 1 1800 90 140\nA 2 1800 40 80\nA 3 1800 40 80\n",
        );
        assert_eq!(causes(&full), ["balloon.guest-full"]);
        let slow =
            of_text("# target 4096\nA 0 1000 4000 4000\nA 1 1100 3900 3900\nA 2 1200 3800 3800\n");
        assert_eq!(causes(&slow), ["balloon.slow"]);
        assert!(slow[0].text.contains("about 29 s"), "{}", slow[0].text);
        assert_eq!(
            causes(&of_text(
                "# target 1200\nA 0 1000 4000 4000\nA 1 1200 3900 3900\n"
            )),
            [""; 0]
        );
    }
}
