//! No arrow runs upwards: the crate graph against the house.
//!
//! The house is the table [`HOUSE`]: each crate's floor and whom it may use, as docs/architecture.md shows it.
//! Dependencies and build dependencies follow the table to the letter. A development dependency may lie on any
//! lower floor, or be the `qtest` client, which knows nothing of the house; it may not run
//! upwards or sideways either, since such a crate could not be published.

use anyhow::bail;
use cargo_metadata::{DependencyKind, Metadata};

use crate::{cargo::Repository, dependencies::is_published, parts::Outcome};

/// Where a crate lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On a floor of the house; published.
    Floor(u8),
    /// Beside the house, published, knowing nothing of it.
    Alone,
    /// Beside the house, unpublished: may use all floors below [`TOP`]. What uses it names it.
    Beside,
}

/// The program's floor. What uses it names it.
const TOP: u8 = 7;

/// A crate of this repository: package name, place, and the packages that it may use.
struct Rule {
    name: &'static str,
    place: Place,
    may_use: &'static [&'static str],
}

const RUNS: &str = "dmaspace-runs";
const IOPT: &str = "dmaspace-iopt";
const HOSTMEM: &str = "dmaspace-hostmem";
const IOMMU: &str = "dmaspace-iommu";
const BALLOON: &str = "dmaspace-virtio-balloon";
const IOAS: &str = "dmaspace-ioas";
const VIRTUAL_IOMMU: &str = "dmaspace-virtio-iommu";
const LIBRARY: &str = "dmaspace";
const VHOST: &str = "dmaspace-vhost";
const VFIO_USER: &str = "dmaspace-vfio-user";
const PROGRAM: &str = "dmaspace-cli";
const BENCH: &str = "dmaspace-bench";
const SCENARIO: &str = "dmaspace-scenario";
const QTEST: &str = "dmaspace-qtest";
const CONFORMANCE: &str = "dmaspace-conformance";
const GUEST: &str = "dmaspace-guest";

const fn rule(name: &'static str, place: Place, may_use: &'static [&'static str]) -> Rule {
    Rule {
        name,
        place,
        may_use,
    }
}

const HOUSE: &[Rule] = &[
    rule(RUNS, Place::Floor(0), &[]),
    rule(IOPT, Place::Floor(1), &[RUNS]),
    rule(HOSTMEM, Place::Floor(1), &[RUNS]),
    rule(IOMMU, Place::Floor(2), &[RUNS, IOPT]),
    rule(BALLOON, Place::Floor(2), &[RUNS, HOSTMEM]),
    rule(IOAS, Place::Floor(3), &[RUNS, IOPT, HOSTMEM, IOMMU]),
    rule(
        VIRTUAL_IOMMU,
        Place::Floor(4),
        &[RUNS, IOPT, HOSTMEM, IOMMU, IOAS],
    ),
    rule(
        LIBRARY,
        Place::Floor(5),
        &[RUNS, IOPT, HOSTMEM, IOMMU, BALLOON, IOAS, VIRTUAL_IOMMU],
    ),
    rule(
        VHOST,
        Place::Floor(6),
        &[RUNS, HOSTMEM, BALLOON, VIRTUAL_IOMMU],
    ),
    rule(
        VFIO_USER,
        Place::Floor(6),
        &[RUNS, IOPT, HOSTMEM, IOMMU, IOAS],
    ),
    rule(
        PROGRAM,
        Place::Floor(TOP),
        &[RUNS, IOPT, HOSTMEM, IOMMU, BALLOON, IOAS, LIBRARY, VHOST],
    ),
    rule(QTEST, Place::Alone, &[]),
    rule(CONFORMANCE, Place::Beside, &[]),
    rule("dmaspace-balloon-rig", Place::Beside, &[CONFORMANCE]),
    // Guests get the topology that the program emits; walks that it explains are done.
    rule(GUEST, Place::Beside, &[CONFORMANCE, PROGRAM]),
    rule("dmaspace-device-rig", Place::Beside, &[CONFORMANCE, GUEST]),
    rule("dmaspace-models", Place::Beside, &[]),
    rule(SCENARIO, Place::Beside, &[]),
    rule("dmaspace-soak", Place::Beside, &[SCENARIO]),
    rule("dmaspace-units", Place::Beside, &[CONFORMANCE, PROGRAM]),
    rule("dmaspace-examples", Place::Beside, &[]),
    rule(BENCH, Place::Beside, &[CONFORMANCE]),
    rule("xtask", Place::Beside, &[]),
];

/// A member of the workspace, as far as the rules ask.
struct Member {
    name: String,
    published: bool,
    edges: Vec<Edge>,
}

/// A dependency on a crate that lies in this repository or bears the name of one.
#[derive(Clone)]
struct Edge {
    to: String,
    dev: bool,
    /// By path; otherwise it comes from a registry.
    local: bool,
}

/// The part `crate-graph` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let members = members(&repository.metadata);
    let faults = faults(&members);
    if !faults.is_empty() {
        let (count, faults) = (faults.len(), faults.join("\n  "));
        bail!("the crate graph breaks the house (faults: {count})\n  {faults}");
    }
    let edges: usize = members.iter().map(|member| member.edges.len()).sum();
    println!("{} crates, {edges} arrows, none upwards", members.len());
    Ok(Outcome::Passed)
}

fn members(metadata: &Metadata) -> Vec<Member> {
    metadata
        .workspace_packages()
        .into_iter()
        .map(|package| Member {
            name: package.name.to_string(),
            published: is_published(package),
            edges: package
                .dependencies
                .iter()
                .filter(|dep| dep.path.is_some() || find(&dep.name).is_some())
                .map(|dep| Edge {
                    to: dep.name.clone(),
                    dev: dep.kind == DependencyKind::Development,
                    local: dep.path.is_some(),
                })
                .collect(),
        })
        .collect()
}

fn find(name: &str) -> Option<&'static Rule> {
    HOUSE.iter().find(|rule| rule.name == name)
}

/// Everything that breaks the house, a sentence each.
fn faults(members: &[Member]) -> Vec<String> {
    let mut faults = Vec::new();
    for member in members {
        let name = &member.name;
        let Some(rule) = find(name) else {
            faults.push(format!("`{name}` is not in the table HOUSE"));
            continue;
        };
        match (rule.place, member.published) {
            (Place::Beside, true) => {
                faults.push(format!("`{name}` lacks `publish = false`"));
            }
            (Place::Floor(_) | Place::Alone, false) => {
                faults.push(format!("`{name}` is to be published"));
            }
            _ => {}
        }
        // An edge to itself is how a crate's own tests turn on a feature.
        let edges = member.edges.iter().filter(|edge| edge.to != *name);
        faults.extend(edges.filter_map(|edge| fault(rule, edge)));
    }
    faults
}

/// What is wrong with this edge, if anything.
fn fault(from: &Rule, edge: &Edge) -> Option<String> {
    let arrow = format!("`{}` uses `{}`", from.name, edge.to);
    let Some(to) = find(&edge.to) else {
        return Some(format!("{arrow}, which is not in the table HOUSE"));
    };
    if !edge.local {
        return Some(format!(
            "{arrow} from a registry, not the one in this repository"
        ));
    }
    let allowed = match (from.place, to.place) {
        _ if from.may_use.contains(&to.name) => true,
        (Place::Beside, Place::Floor(floor)) => floor < TOP,
        (Place::Beside, Place::Alone) => true,
        (Place::Floor(a), Place::Floor(b)) => edge.dev && b < a,
        (Place::Floor(_), Place::Alone) => edge.dev,
        _ => false,
    };
    (!allowed).then(|| {
        format!(
            "{arrow} ({:?} to {:?}), which the table does not allow",
            from.place, to.place
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(to: &str) -> Edge {
        Edge {
            to: to.into(),
            dev: false,
            local: true,
        }
    }

    fn tests_with(to: &str) -> Edge {
        Edge {
            dev: true,
            ..uses(to)
        }
    }

    /// How many faults a crate with one dependency has.
    fn count(name: &str, edge: Edge) -> usize {
        let published = !matches!(find(name).map(|rule| rule.place), Some(Place::Beside));
        let edges = vec![edge];
        let name = name.into();
        faults(&[Member {
            name,
            published,
            edges,
        }])
        .len()
    }

    #[test]
    fn the_table_itself_has_no_arrow_upwards() {
        for rule in HOUSE {
            for used in rule.may_use {
                let to = find(used).unwrap_or_else(|| panic!("{used} is not in the table"));
                match (rule.place, to.place) {
                    (Place::Floor(a), Place::Floor(b)) => assert!(b < a, "{} {used}", rule.name),
                    (Place::Beside, Place::Beside) => {}
                    (Place::Beside, Place::Floor(TOP)) => {}
                    _ => panic!("{} names {used}", rule.name),
                }
            }
        }
    }

    #[test]
    fn an_arrow_upwards_sideways_or_past_the_table_fails() {
        assert_eq!(count(RUNS, uses(IOPT)), 1);
        assert_eq!(count(RUNS, tests_with(IOPT)), 1, "also in tests");
        assert_eq!(count(IOPT, uses(HOSTMEM)), 1);
        assert_eq!(count(IOPT, tests_with(HOSTMEM)), 1);
        assert_eq!(count(IOMMU, uses(HOSTMEM)), 1, "below, but not allowed");
        assert_eq!(count(IOMMU, tests_with(HOSTMEM)), 0);
        assert_eq!(count(IOAS, uses(BALLOON)), 1, "ioas knows no balloon");
        assert_eq!(
            count(IOMMU, tests_with(IOMMU)),
            0,
            "a feature for its tests"
        );
    }

    #[test]
    fn unpublished_crates_are_used_by_those_that_name_them() {
        for user in [IOAS, LIBRARY, VHOST, BENCH, "dmaspace-examples"] {
            assert_eq!(count(user, uses(PROGRAM)), 1, "{user}");
        }
        assert_eq!(count(IOAS, tests_with(CONFORMANCE)), 1);
        assert_eq!(count(CONFORMANCE, uses(BENCH)), 1);
        assert_eq!(count(CONFORMANCE, uses(LIBRARY)), 0);
        assert_eq!(count("dmaspace-units", uses(PROGRAM)), 0);
        assert_eq!(count(PROGRAM, uses(BENCH)), 1);
        assert_eq!(count(PROGRAM, uses(CONFORMANCE)), 1);
        assert_eq!(count(PROGRAM, uses(SCENARIO)), 1);
        assert_eq!(count(SCENARIO, uses(PROGRAM)), 1);
    }

    #[test]
    fn qtest_knows_nothing_of_the_house_and_serves_tests_only() {
        assert_eq!(count(QTEST, uses(RUNS)), 1);
        assert_eq!(count(QTEST, tests_with(RUNS)), 1);
        assert_eq!(count(IOMMU, uses(QTEST)), 1);
        assert_eq!(count(IOMMU, tests_with(QTEST)), 0);
        assert_eq!(count(CONFORMANCE, uses(QTEST)), 0);
    }

    #[test]
    fn what_the_table_does_not_know_or_publishes_otherwise_fails() {
        assert_eq!(count(IOAS, uses("helpers")), 1);
        assert_eq!(count("helpers", uses(RUNS)), 1);
        let foreign = Edge {
            local: false,
            ..uses(QTEST)
        };
        assert_eq!(count(CONFORMANCE, foreign), 1, "a namesake");
        let other = [("xtask", true), (RUNS, false)].map(|(name, published)| Member {
            name: name.into(),
            published,
            edges: Vec::new(),
        });
        assert_eq!(faults(&other).len(), 2);
    }
}
