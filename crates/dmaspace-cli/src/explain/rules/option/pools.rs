//! Options of huge pages: a number is of the size before it, and a size is one that the machine has.

use super::words;
use crate::explain::facts::{Facts, Known};
use crate::explain::finding::{Advice, Finding};

/// Sizes and numbers of huge pages, in their order.
pub(super) fn pools(facts: &Facts, one: &Known<String>, found: &mut Vec<Finding>) {
    const SOURCE: &str = "Linux Documentation/admin-guide/mm/hugetlbpage.rst; mm/hugetlb.c, hugepages_setup, hugepagesz_setup, default_hugepagesz_setup";
    // Numbers before any size, and the size that waits for its number.
    let (mut early, mut size): (Option<String>, Option<String>) = (None, None);
    let mut sized = false;
    for (name, value) in words(&one.fact) {
        let Some(value) = value else {
            continue;
        };
        let shown = format!("{name}={value}");
        match name.as_str() {
            "hugepagesz" | "default_hugepagesz" => {
                sized = true;
                size = Some(shown).filter(|_| name == "hugepagesz");
                missing_size(facts, one, &name, value, found);
            }
            "hugepages" if sized => size = None,
            "hugepages" => early = Some(shown),
            _ => {}
        }
    }
    if let (Some(early), Some(size)) = (early, size) {
        let finding = Finding::certain("option.without-effect", SOURCE)
            .evidence([&one.evidence])
            .say(format!(
                "{early} stands before {size}, so that it is of the default size; no number follows {size}, which gets no \
                 pages at boot."
            ))
            .advise(Advice::text(format!("The size first: {size} {early}.")));
        found.push(finding);
    }
}

/// A size that this machine does not have: its pools are there whether they have pages or not.
fn missing_size(
    facts: &Facts,
    one: &Known<String>,
    name: &str,
    value: &str,
    found: &mut Vec<Finding>,
) {
    let own = |file: usize| facts.own.contains(&file);
    let pools = facts.pools.iter();
    let pools = pools.filter(|pool| pool.fact.node.is_none() && own(pool.evidence.place.file));
    let pools: Vec<_> = pools.collect();
    let unit = match value.trim_start_matches(|c: char| c.is_ascii_digit()) {
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "" => 0,
        _ => return,
    };
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let Some(bytes) = digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1 << unit))
    else {
        return;
    };
    let there = pools.iter().any(|pool| pool.fact.page_bytes == bytes);
    if pools.is_empty() || there || !own(one.evidence.place.file) {
        return;
    }
    let sizes: Vec<String> = pools
        .iter()
        .map(|pool| crate::size::bytes(pool.fact.page_bytes))
        .collect();
    let finding = Finding::certain("option.unknown-value", "Linux mm/hugetlb.c, hugepagesz_setup, default_hugepagesz_setup; arch/x86/mm/hugetlbpage.c, arch_hugetlb_valid_size")
        .evidence([&one.evidence])
        .evidence(pools.iter().map(|pool| &pool.evidence))
        .say(format!(
            "{name}={value}: this machine has huge pages of {} and none of this size, so that the kernel ignores it.",
            sizes.join(", ")
        ))
        .advise(Advice::text("A size that /sys/kernel/mm/hugepages shows."));
    found.push(finding);
}
