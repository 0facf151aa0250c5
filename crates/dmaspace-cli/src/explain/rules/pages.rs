//! Pools of huge pages, and pages of confidential guests.

use super::super::facts::{Facts, Known, Line};
use super::super::finding::{Advice, Finding};
use crate::inspect::Guest;
use crate::inspect::needs::{self, Available};

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
                .advise(Advice::text("grep . /sys/devices/system/node/node*/hugepages/*/free_hugepages shows free pages.")),
        );
    }
    rmp(facts, found);
}

/// Need and counts; true where both were given.
fn pools(facts: &Facts, one: &Known<Guest>, found: &mut Vec<Finding>) -> bool {
    let needs = needs::pool_needs(&one.fact);
    let available = Available {
        pools: facts.pools.iter().map(|pool| pool.fact).collect(),
        ..Available::default()
    };
    let here = |page: u64| {
        facts
            .pools
            .iter()
            .filter(move |pool| pool.fact.page_bytes == page)
    };
    for short in needs::short_pools(&needs, &available) {
        let counts = needs.iter().flat_map(|need| here(need.page_bytes));
        found.push(
            super::of_need(short)
                .evidence([&one.evidence])
                .evidence(counts.map(|pool| &pool.evidence)),
        );
    }
    needs
        .iter()
        .any(|need| here(need.page_bytes).next().is_some())
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
                "Take the page from another region: firmware must release pages that it has assigned (firmware update, \
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
