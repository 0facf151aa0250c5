//! No arrow runs upwards: the crate graph against the house.
//!
//! The house is the table [`HOUSE`]: each crate's floor and whom it may use. Dependencies and
//! build dependencies follow the table to the letter. A development dependency may lie on any
//! lower floor, or be the `qtest` client, which knows nothing of the house; it may not run
//! upwards or sideways either, since such a crate could not be published.

use std::collections::BTreeSet;

use anyhow::bail;
use cargo_metadata::{DependencyKind, Metadata};

use crate::{cargo::Repository, house, parts::Outcome};

/// Where a crate lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On a floor of the house; published.
    Floor(u8),
    /// On top of the house: may use all of it and the lab. Unpublished, as the lab is; only rigs that name it
    /// may use it.
    Program,
    /// Beside the house, published, knowing nothing of it.
    Alone,
    /// Beside the house, unpublished: may use everything, and nobody may use it but another such
    /// that names it.
    Beside,
}

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
const PROGRAM: &str = "dmaspace-cli";
const LAB: &str = "dmaspace-lab";
const QTEST: &str = "dmaspace-qtest";
const CONFORMANCE: &str = "dmaspace-conformance";

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
    // What it needs of the crates below, the library re-exports.
    rule("dmaspace-capi", Place::Floor(6), &[LIBRARY]),
    rule(
        PROGRAM,
        Place::Program,
        &[
            RUNS, IOPT, HOSTMEM, IOMMU, BALLOON, IOAS, LIBRARY, VHOST, LAB,
        ],
    ),
    rule(QTEST, Place::Alone, &[]),
    rule(CONFORMANCE, Place::Beside, &[]),
    rule("dmaspace-balloon-rig", Place::Beside, &[CONFORMANCE]),
    // Guests get the topology that the program emits; walks that it explains are done.
    rule("dmaspace-guest", Place::Beside, &[CONFORMANCE, PROGRAM]),
    rule("dmaspace-models", Place::Beside, &[]),
    rule("dmaspace-soak", Place::Beside, &[]),
    rule("dmaspace-units", Place::Beside, &[CONFORMANCE, PROGRAM]),
    rule("dmaspace-examples", Place::Beside, &[]),
    rule(LAB, Place::Beside, &[CONFORMANCE]),
    rule("xtask", Place::Beside, &[]),
    rule("nostd-check", Place::Beside, &[]),
];

/// A member of the workspace, as far as the rules ask.
#[derive(Clone, Debug)]
struct Member {
    name: String,
    published: bool,
    edges: Vec<Edge>,
}

/// A dependency on a crate that lies in this repository or bears the name of one.
#[derive(Clone, Debug)]
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
    house::check(repository)?;
    Ok(Outcome::Passed)
}

fn members(metadata: &Metadata) -> Vec<Member> {
    metadata
        .workspace_packages()
        .into_iter()
        .map(|package| Member {
            name: package.name.to_string(),
            published: package.publish.as_ref().is_none_or(|to| !to.is_empty()),
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

/// The crates that are there, by floor, and who uses whom.
pub(crate) struct House {
    /// From the ground up, each in the order of [`HOUSE`].
    pub(crate) floors: Vec<Vec<String>>,
    /// By name: from, to. Development dependencies are none.
    pub(crate) arrows: BTreeSet<(String, String)>,
}

impl House {
    /// The arrows that do not follow from others.
    pub(crate) fn needed(&self) -> impl Iterator<Item = (&str, &str)> {
        let arrows = self.arrows.iter();
        let implied = |from: &String, to: &String| {
            let through = |(user, used): &(String, String)| user == from && self.reaches(used, to);
            self.arrows.iter().any(through)
        };
        arrows
            .filter(move |(from, to)| !implied(from, to))
            .map(|(from, to)| (from.as_str(), to.as_str()))
    }

    /// Whether one uses the other, itself or through others. No arrow runs upwards, so this ends.
    fn reaches(&self, from: &str, to: &str) -> bool {
        let mut used = self.arrows.iter().filter(|(user, _)| user == from);
        used.any(|(_, next)| next == to || self.reaches(next, to))
    }
}

/// The house as the members of the workspace make it.
pub(crate) fn house(repository: &Repository) -> House {
    let members = members(&repository.metadata);
    let top = HOUSE.iter().filter_map(|rule| match rule.place {
        Place::Floor(floor) => Some(usize::from(floor)),
        _ => None,
    });
    let top = top.max().unwrap_or_default();
    let floor_of = |name: &str| match find(name)?.place {
        Place::Floor(floor) => Some(usize::from(floor)),
        Place::Program => Some(top + 1),
        Place::Alone | Place::Beside => None,
    };
    let mut house = House {
        floors: Vec::new(),
        arrows: BTreeSet::new(),
    };
    for rule in HOUSE {
        let member = members.iter().find(|member| member.name == rule.name);
        let (Some(member), Some(floor)) = (member, floor_of(rule.name)) else {
            continue;
        };
        if house.floors.len() <= floor {
            house.floors.resize(floor + 1, Vec::new());
        }
        house.floors[floor].push(rule.name.into());
        let used = member.edges.iter().filter(|edge| !edge.dev);
        let inside = used.filter(|edge| floor_of(&edge.to).is_some_and(|below| below < floor));
        house
            .arrows
            .extend(inside.map(|edge| (rule.name.into(), edge.to.clone())));
    }
    house
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
            faults.push(format!(
                "`{name}` has no place in the house: add it to HOUSE"
            ));
            continue;
        };
        match (rule.place, member.published) {
            (Place::Beside | Place::Program, true) => {
                faults.push(format!(
                    "`{name}` lies beside the house or on top of it and lacks `publish = false`"
                ));
            }
            (Place::Floor(_) | Place::Alone, false) => {
                faults.push(format!(
                    "`{name}` belongs to the published crates and is unpublished"
                ));
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
        return Some(format!(
            "{arrow}, which has no place in the house: add it to HOUSE"
        ));
    };
    if !edge.local {
        return Some(format!(
            "{arrow} from a registry, not the one in this repository"
        ));
    }
    match (from.place, to.place) {
        // Linux's code is timed by the one and shown by the other; its source is fetched by one.
        (Place::Beside, Place::Beside | Place::Program) | (Place::Program, Place::Beside)
            if from.may_use.contains(&to.name) =>
        {
            None
        }
        (_, Place::Program) => Some(format!("{arrow}: nothing may use a command")),
        (_, Place::Beside) => Some(format!("{arrow}, which is unpublished: nobody may use it")),
        (Place::Beside, _) => None,
        (Place::Alone, _) => Some(format!("{arrow}, but must know nothing of the house")),
        (Place::Floor(_), Place::Alone) if edge.dev => None,
        (Place::Floor(a), Place::Floor(b)) if b > a => Some(format!(
            "{arrow}: an arrow upwards, from floor {a} to floor {b}"
        )),
        (Place::Floor(a), Place::Floor(b)) if edge.dev && b < a => None,
        _ if from.may_use.contains(&to.name) => None,
        _ => {
            let may = from.may_use.join(", ");
            let may = if may.is_empty() {
                "none of the house"
            } else {
                &may
            };
            Some(format!("{arrow}, but may use {may}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, edges: &[Edge]) -> Member {
        Member {
            name: name.into(),
            published: !matches!(
                find(name),
                Some(Rule {
                    place: Place::Beside | Place::Program,
                    ..
                })
            ),
            edges: edges.to_vec(),
        }
    }

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

    fn one(name: &str, edge: Edge) -> Vec<String> {
        faults(&[member(name, &[edge])])
    }

    #[test]
    fn the_house_itself_has_no_arrow_upwards() {
        for rule in HOUSE {
            for used in rule.may_use {
                let Some(used) = find(used) else {
                    panic!("{} may use {used}, which is not in the table", rule.name);
                };
                match (rule.place, used.place) {
                    (Place::Floor(a), Place::Floor(b)) => assert!(b < a, "{}", rule.name),
                    (Place::Beside, Place::Beside | Place::Program)
                    | (Place::Program, Place::Beside | Place::Floor(_)) => {}
                    _ => panic!("only floors have arrows: {}", rule.name),
                }
            }
        }
    }

    #[test]
    fn every_arrow_of_the_table_is_allowed() {
        for rule in HOUSE {
            let edges: Vec<_> = rule.may_use.iter().map(|to| uses(to)).collect();
            assert_eq!(faults(&[member(rule.name, &edges)]), Vec::<String>::new());
        }
    }

    #[test]
    fn an_arrow_upwards_fails() {
        let found = one(RUNS, uses(IOPT));
        assert_eq!(
            found,
            ["`dmaspace-runs` uses `dmaspace-iopt`: an arrow upwards, from floor 0 to floor 1"]
        );
        assert_eq!(one(RUNS, tests_with(IOPT)).len(), 1, "also in tests");
    }

    #[test]
    fn an_arrow_sideways_or_past_the_table_fails() {
        assert_eq!(one(IOPT, uses(HOSTMEM)).len(), 1);
        assert_eq!(one(IOPT, tests_with(HOSTMEM)).len(), 1);
        assert_eq!(one(IOMMU, uses(HOSTMEM)).len(), 1, "below, but not allowed");
        assert_eq!(one(IOAS, uses(BALLOON)).len(), 1, "ioas knows no balloon");
        assert_eq!(
            one("dmaspace-capi", uses(RUNS)),
            ["`dmaspace-capi` uses `dmaspace-runs`, but may use dmaspace"]
        );
        assert_eq!(one(IOMMU, tests_with(HOSTMEM)), Vec::<String>::new());
    }

    #[test]
    fn an_unknown_crate_fails_as_member_and_as_dependency() {
        assert_eq!(faults(&[member("helpers", &[])]).len(), 1);
        assert_eq!(one(IOAS, uses("helpers")).len(), 1);
    }

    #[test]
    fn nobody_uses_an_unpublished_crate() {
        assert_eq!(one(IOAS, uses(CONFORMANCE)).len(), 1);
        assert_eq!(one(IOAS, tests_with(CONFORMANCE)).len(), 1);
        assert_eq!(one(CONFORMANCE, uses(LAB)).len(), 1);
        assert_eq!(one(CONFORMANCE, uses(LIBRARY)), Vec::<String>::new());
    }

    #[test]
    fn nothing_but_the_rigs_that_name_it_uses_the_program() {
        for user in [LIBRARY, VHOST, LAB, "dmaspace-soak", "dmaspace-examples"] {
            let found = one(user, uses(PROGRAM));
            let arrow = format!("`{user}` uses `dmaspace-cli`: nothing may use a command");
            assert_eq!(found, [arrow]);
        }
        assert_eq!(one("dmaspace-units", uses(PROGRAM)), [""; 0]);
        assert_eq!(one(PROGRAM, uses(LAB)), [""; 0]);
        assert_eq!(one(PROGRAM, uses(CONFORMANCE)).len(), 1);
        assert_eq!(one(LIBRARY, uses(LAB)).len(), 1);
    }

    #[test]
    fn qtest_knows_nothing_of_the_house_and_serves_tests_only() {
        assert_eq!(one(QTEST, uses(RUNS)).len(), 1);
        assert_eq!(one(QTEST, tests_with(RUNS)).len(), 1);
        assert_eq!(one(IOMMU, uses(QTEST)).len(), 1);
        assert_eq!(one(IOMMU, tests_with(QTEST)), Vec::<String>::new());
        assert_eq!(one(CONFORMANCE, uses(QTEST)), Vec::<String>::new());
    }

    #[test]
    fn a_namesake_from_a_registry_fails() {
        let foreign = Edge {
            local: false,
            ..uses(QTEST)
        };
        assert_eq!(one(CONFORMANCE, foreign).len(), 1);
    }

    #[test]
    fn what_is_published_is_settled_by_the_table() {
        let mut xtask = member("xtask", &[]);
        xtask.published = true;
        let mut runs = member(RUNS, &[]);
        runs.published = false;
        assert_eq!(faults(&[xtask, runs]).len(), 2);
    }

    #[test]
    fn a_crate_may_name_itself_to_turn_on_a_feature_in_its_tests() {
        assert_eq!(one(IOMMU, tests_with(IOMMU)), Vec::<String>::new());
    }
}
