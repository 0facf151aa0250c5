//! Pools of huge pages, and pages of confidential guests.

use std::collections::BTreeMap;

use super::super::facts::{Facts, Known, Line};
use super::super::finding::{Advice, Finding};
use crate::inspect::Guest;

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    let mut counted = false;
    for one in &facts.configurations {
        counted |= pools(facts, one, found);
    }
    let empty: Vec<_> = facts
        .lines
        .iter()
        .filter(|one| matches!(one.fact, Line::PoolEmpty { .. }))
        .collect();
    let told = found.iter().any(|one| one.cause.starts_with("pages.short"));
    if !empty.is_empty() && !told && !counted {
        found.push(
            Finding::likely("pages.short", "QEMU util/oslib-posix.c, qemu_prealloc_mem; Linux Documentation/admin-guide/mm/hugetlbpage.rst")
                .evidence(empty.iter().map(|one| &one.evidence))
                .say(
                    "Memory from a pool of huge pages could not be had: likely fewer pages are free than the guest \
                     needs. The counts of each node (free_hugepages) decide.",
                )
                .advise(Advice::text("grep . /sys/devices/system/node/node*/hugepages/*/free_hugepages shows what is free.")),
        );
    }
    rmp(facts, found);
}

/// Need and counts; true where both were given.
fn pools(facts: &Facts, one: &Known<Guest>, found: &mut Vec<Finding>) -> bool {
    let mut need: BTreeMap<u64, u64> = BTreeMap::new();
    let mut bound: BTreeMap<(u64, Vec<u32>), u64> = BTreeMap::new();
    for part in &one.fact.memory {
        let Some(page) = part.pool_bytes.filter(|page| *page > 0) else {
            continue;
        };
        let pages = part.bytes.div_ceil(page);
        *need.entry(page).or_default() += pages;
        if part.bound && !part.host_nodes.is_empty() {
            *bound.entry((page, part.host_nodes.clone())).or_default() += pages;
        }
    }
    let mut counted = false;
    for (page, pages) in need {
        let pools: Vec<_> = facts
            .pools
            .iter()
            .filter(|pool| pool.fact.page == page)
            .collect();
        if pools.is_empty() {
            continue;
        }
        counted = true;
        let nodes: Vec<_> = pools
            .iter()
            .filter(|pool| pool.fact.node.is_some())
            .collect();
        let free: u64 = match nodes.is_empty() {
            true => pools.iter().map(|pool| pool.fact.free).max().unwrap_or(0),
            false => nodes
                .iter()
                .fold(0u64, |sum, pool| sum.saturating_add(pool.fact.free)),
        };
        let size = crate::size::bytes(page);
        let base = |cause| {
            Finding::certain(cause, "Linux Documentation/admin-guide/mm/hugetlbpage.rst; QEMU qapi/qom.json, MemoryBackendProperties (policy)")
                .evidence([&one.evidence])
                .evidence(pools.iter().map(|pool| &pool.evidence))
        };
        if pages > free {
            found.push(
                base("pages.short")
                    .say(format!("The guest needs {pages} pages of {size}, and {free} are free: {} are missing.", pages - free))
                    .advise(Advice::text(format!(
                        "Raise nr_hugepages of the pool of {size} by {} (early after the boot, or hugepagesz= and \
                         hugepages= on the kernel's command line), or give the guest less memory.",
                        pages - free
                    ))),
            );
            continue;
        }
        for ((_, set), pages) in bound.iter().filter(|((of, _), _)| *of == page) {
            let on: Vec<_> = nodes
                .iter()
                .filter(|pool| pool.fact.node.is_some_and(|node| set.contains(&node)))
                .collect();
            let there = on
                .iter()
                .fold(0u64, |sum, pool| sum.saturating_add(pool.fact.free));
            if nodes.is_empty() || *pages <= there {
                continue;
            }
            let list: Vec<String> = set.iter().map(u32::to_string).collect();
            let missing = pages - there;
            let node = list.join(", ");
            let finding = base("pages.short-on-node").say(format!(
                "The guest needs {pages} pages of {size} from node {node}, to which its memory is bound, and {there} are \
                 free there; all nodes together have {free}, which would do."
            ));
            let path = match set.as_slice() {
                [node] => format!(
                    "/sys/devices/system/node/node{node}/hugepages/hugepages-{}kB/nr_hugepages",
                    page >> 10
                ),
                _ => "nr_hugepages of one of these nodes".into(),
            };
            found.push(
                finding
                    .advise(Advice::text(format!("Raise {path} by {missing}.")))
                    .advise(Advice::text(
                        "Or spread the memory: a cell or memory object for each node, bound to it.",
                    )),
            );
        }
    }
    counted
}

/// Changes of the reverse map table. Source: AMD 24594 3.36, RMPUPDATE, "Return codes".
fn rmp(facts: &Facts, found: &mut Vec<Finding>) {
    for (nth, one) in facts.lines.iter().enumerate() {
        let Line::RmpUpdate { pfn, level, code } = &one.fact else {
            continue;
        };
        let meaning = match code {
            1 => "FAIL_INPUT: the input is not valid",
            2 => {
                "FAIL_PERMISSION: the page may not be changed with this permission; it is not an overlap of page sizes"
            }
            3 => "FAIL_INUSE: another processor changes the entry",
            4 => "FAIL_OVERLAP: an entry of another page size covers it",
            _ => "a code without a published meaning",
        };
        let bytes = if *level == 2 { 2 << 20 } else { 4096u64 };
        let first = pfn.saturating_mul(4096);
        let mut finding = Finding::certain(
            "pages.rmp-update",
            "AMD 24594 3.36, RMPUPDATE, return codes; Linux arch/x86/virt/svm/sev.c, rmpupdate",
        )
        .range(first, first.saturating_add(bytes - 1))
        .evidence([&one.evidence]);
        let mut text = format!(
            "A change of the owner of page frame {pfn:#x} (address {first:#x}) was refused with {code}: {meaning}."
        );
        // Entries that the kernel printed behind it.
        let near = facts.lines.iter().skip(nth + 1).take(64);
        let entries: Vec<_> = near
            .take_while(|one| matches!(one.fact, Line::RmpEntry { .. }))
            .collect();
        // Linux arch/x86/virt/svm/sev.c, struct rmpentry_raw: assigned is bit 0, page size bit 1, immutable bit 2.
        let fixed = entries
            .iter()
            .filter(|one| matches!(one.fact, Line::RmpEntry { low, .. } if low & 0b111 == 0b101))
            .count();
        if !entries.is_empty() {
            finding = finding.evidence(entries.iter().map(|one| &one.evidence));
            if fixed > 0 {
                text += &format!(
                    " {fixed} of {} entries around it are of 4 KiB, assigned and immutable: pages of firmware, or locked.",
                    entries.len()
                );
            }
        }
        let finding = finding.say(text);
        found.push(match code {
            2 => finding.advise(Advice::text(
                "Take the page from another region: what firmware has assigned, it must release (firmware update, \
                 SNP shutdown).",
            )),
            4 => finding.advise(Advice::text("Split the large entry before (PSMASH), or change all of its pages at once.")),
            _ => finding,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{causes, of_text};

    fn line(policy: &str) -> String {
        format!(
            "qemu-system-x86_64 -m 8G -object memory-backend-memfd,id=a,size=8G,hugetlb=on,hugetlbsize=2M,prealloc=on,\
             host-nodes=0{policy} -machine q35,memory-backend=a\n"
        )
    }

    fn pools(first: u64, second: u64) -> String {
        let one = |node, free| {
            format!(
                "/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/free_hugepages:{free}\n"
            )
        };
        one(0, first) + &one(1, second)
    }

    #[test]
    fn pages_are_short_together_or_on_the_node() {
        let bound = line(",policy=bind");
        assert_eq!(
            causes(&of_text(&(bound.clone() + &pools(1000, 1000)))),
            ["pages.short"]
        );
        assert_eq!(
            causes(&of_text(&(bound.clone() + &pools(1000, 4000)))),
            ["pages.short-on-node"]
        );
        assert!(!causes(&of_text(&(bound + &pools(4096, 0)))).contains(&"pages.short-on-node"));
        assert!(
            !causes(&of_text(&(line(",policy=preferred") + &pools(1000, 4000))))
                .contains(&"pages.short-on-node")
        );
    }

    #[test]
    fn refused_changes_have_the_name_of_their_code() {
        let found =
            of_text("[  1.0] SEV-SNP: RMPUPDATE failed for PFN 1a2b3, pg_level: 2, ret: 4\n");
        assert_eq!(causes(&found), ["pages.rmp-update"]);
        assert_eq!(found[0].addresses, [(0x1a2b_3000, 0x1a2b_3000 + 0x1f_ffff)]);
        assert!(found[0].text.contains("FAIL_OVERLAP"));
    }
}
