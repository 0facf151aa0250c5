//! Instructions of one operation by layer, from what callgrind writes.
//!
//! An instruction belongs to the layer of its source file, where the program has lines and the file is one of ours, else
//! to that of its function. Code that no layer has by itself (the allocator, `memcpy`, the trees of ranges, functions of the
//! standard library that were not inlined) belongs to the layers that call it, in proportion to the instructions that the
//! calls took.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};

/// Layers, from a call of the address space to the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Layer {
    /// The call itself: its checks, its locks, and what belongs to no other layer.
    Call,
    /// Areas and the ranges that operations take.
    Areas,
    /// Holds of memory: charge, pin, parts.
    Holds,
    /// Runs in batches on their way to the table.
    Runs,
    /// The page table: its entries, the gather and tables that are given back.
    Table,
    /// The gather and holds until they are flushed.
    Flush,
    /// The driver of the unit.
    Driver,
    /// The unit behind the registers, or the software unit.
    Unit,
}

impl Layer {
    /// All of them, with what the table calls them.
    pub(super) const ALL: [(Self, &'static str); 8] = [
        (Self::Table, "table"),
        (Self::Call, "call"),
        (Self::Areas, "areas"),
        (Self::Holds, "holds"),
        (Self::Runs, "runs"),
        (Self::Flush, "flush"),
        (Self::Driver, "driver"),
        (Self::Unit, "unit"),
    ];

    /// Layer of a source file.
    fn of_file(path: &str) -> Option<Self> {
        const FILES: [(&str, Option<Layer>); 14] = [
            ("/crates/iopt/", Some(Layer::Table)),
            ("/crates/iommu/src/software/", Some(Layer::Unit)),
            ("/crates/iommu/", Some(Layer::Driver)),
            ("/conformance/guest/", Some(Layer::Unit)),
            ("/crates/ioas/src/ranges/intervals", None),
            ("/crates/ioas/src/ranges/range_map", None),
            ("/crates/ioas/src/areas/", Some(Layer::Areas)),
            ("/crates/ioas/src/space/operation", Some(Layer::Areas)),
            ("/crates/ioas/src/ranges/", Some(Layer::Areas)),
            ("/crates/ioas/src/memory/", Some(Layer::Holds)),
            ("/crates/ioas/src/own/fill", Some(Layer::Runs)),
            ("/crates/ioas/src/space/flush", Some(Layer::Flush)),
            ("/crates/ioas/src/own/domain", Some(Layer::Flush)),
            ("/crates/ioas/src/own/software", Some(Layer::Unit)),
        ];
        let known = FILES.iter().find(|(part, _)| path.contains(part));
        known.and_then(|(_, layer)| *layer)
    }

    /// Layer of a function: that of the first path in its name that has one.
    fn of_function(name: &str) -> Option<Self> {
        const PATHS: [(&str, Option<Layer>); 16] = [
            ("iopt::", Some(Layer::Table)),
            ("iommu::software::", Some(Layer::Unit)),
            ("iommu::", Some(Layer::Driver)),
            ("guest::unit::", Some(Layer::Unit)),
            ("ioas::ranges::intervals::", None),
            ("ioas::ranges::range_map::", None),
            ("ioas::areas::", Some(Layer::Areas)),
            ("ioas::space::operation::", Some(Layer::Areas)),
            ("ioas::ranges::", Some(Layer::Areas)),
            ("ioas::memory::", Some(Layer::Holds)),
            ("ioas::own::fill::", Some(Layer::Runs)),
            ("ioas::space::flush::", Some(Layer::Flush)),
            ("ioas::own::domain::", Some(Layer::Flush)),
            ("ioas::own::software::", Some(Layer::Unit)),
            ("ioas::", Some(Layer::Call)),
            ("dmaspace_bench::", Some(Layer::Call)),
        ];
        let places = PATHS.iter().enumerate();
        let found = places.filter_map(|(n, (path, layer))| Some((name.find(path)?, n, *layer)));
        found
            .min_by_key(|(at, n, _)| (*at, *n))
            .and_then(|(.., layer)| layer)
    }
}

/// Instructions of one operation.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    /// In all.
    pub(super) all: f64,
    /// Instructions of each layer.
    pub(super) layers: BTreeMap<Layer, f64>,
}

/// Where instructions are, or a call comes from: in a layer, or in a function of none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place<'d> {
    Layer(Layer),
    Helper(&'d str),
}

impl<'d> Place<'d> {
    fn of(file: &str, function: &'d str) -> Self {
        let layer = Layer::of_file(file).or_else(|| Layer::of_function(function));
        layer.map_or(Self::Helper(function), Self::Layer)
    }
}

/// Counts of callgrind.
#[derive(Default)]
struct Dump<'d> {
    own: BTreeMap<Place<'d>, u64>,
    /// Instructions of calls of helpers, by helper and caller.
    calls: BTreeMap<&'d str, BTreeMap<Place<'d>, u64>>,
    all: u64,
}

impl<'d> Dump<'d> {
    /// Reads the format "callgrind", version 1, without compressed names and positions.
    fn read(text: &'d str) -> anyhow::Result<Self> {
        let mut dump = Self::default();
        let (mut file, mut function) = ("", "");
        let (mut callee, mut is_call) = ("", false);
        for line in text.lines() {
            if let Some((key, value)) = line.split_once('=') {
                match key {
                    "fl" | "fi" | "fe" => file = value,
                    "fn" => function = value,
                    "cfn" => callee = value,
                    "calls" => is_call = true,
                    _ => {}
                }
                continue;
            }
            if let Some(total) = line.strip_prefix("totals: ") {
                dump.all = total.trim().parse().context("totals")?;
            }
            if !line.starts_with(|first: char| first.is_ascii_digit()) {
                continue;
            }
            let count = line.split(' ').nth(1).unwrap_or("0");
            let count: u64 = count.parse().with_context(|| format!("`{line}`"))?;
            let place = Place::of(file, function);
            if !std::mem::take(&mut is_call) {
                *dump.own.entry(place).or_default() += count;
            } else if Layer::of_function(callee).is_none() && callee != function {
                *dump
                    .calls
                    .entry(callee)
                    .or_default()
                    .entry(place)
                    .or_default() += count;
            }
        }
        Ok(dump)
    }

    /// The layers that a helper works for, with their shares.
    fn shares(&self) -> BTreeMap<&'d str, BTreeMap<Layer, f64>> {
        let mut shares: BTreeMap<&str, BTreeMap<Layer, f64>> = BTreeMap::new();
        // Helpers that call helpers: as deep as it goes.
        for _ in 0..32 {
            let last = shares.clone();
            for (callee, callers) in &self.calls {
                let mut of_layers = BTreeMap::new();
                for (caller, count) in callers {
                    let mut add = |layer, share| {
                        *of_layers.entry(layer).or_insert(0.0) += *count as f64 * share;
                    };
                    match caller {
                        Place::Layer(layer) => add(*layer, 1.0),
                        Place::Helper(name) => {
                            let of_caller = last.get(name).into_iter().flatten();
                            of_caller.for_each(|(layer, share)| add(*layer, *share));
                        }
                    }
                }
                let sum: f64 = of_layers.values().sum();
                of_layers.values_mut().for_each(|share| *share /= sum);
                shares.insert(callee, of_layers);
            }
        }
        shares
    }
}

impl Profile {
    /// Figures of one of `times` operations that callgrind has counted.
    pub(super) fn parse(text: &str, times: u64) -> anyhow::Result<Self> {
        let dump = Dump::read(text)?;
        let shares = dump.shares();
        let mut layers = BTreeMap::new();
        for (place, count) in &dump.own {
            let mut add = |layer, share| {
                *layers.entry(layer).or_insert(0.0) += *count as f64 * share / times as f64;
            };
            match place {
                Place::Layer(layer) => add(*layer, 1.0),
                Place::Helper(name) => match shares.get(name) {
                    Some(shares) => shares.iter().for_each(|(layer, share)| add(*layer, *share)),
                    None => add(Layer::Call, 1.0),
                },
            }
        }
        let all = dump.all as f64 / times as f64;
        let sum: f64 = layers.values().sum();
        ensure!(
            all > 0.0 && (sum - all).abs() < 1.0,
            "{sum} instructions by layer, {all} in all"
        );
        Ok(Self { all, layers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation of 100 instructions: 10 in the call, of which 4 by a line of the table that was inlined; 60 by the
    /// table; 30 by the allocator, a third for the table.
    const DUMP: &str = "version: 1
events: Ir

fl=/w/bench/src/layers/case.rs
fn=dmaspace_bench::layers::case::measured_map
1 6
fi=/w/crates/iopt/src/any/mod.rs
2 4
fe=/w/bench/src/layers/case.rs
cfn=<iopt::table as iopt::Ops>::map
calls=1 10
3 70
cfn=malloc
calls=2 0
4 20

fl=/w/crates/iopt/src/engine/map.rs
fn=<iopt::table as iopt::Ops>::map
10 60
cfn=malloc
calls=1 0
11 10

fl=malloc.c
fn=malloc
0 12
cfn=_int_malloc
calls=3 0
1 18

fl=malloc.c
fn=_int_malloc
0 18

totals: 100
";

    #[test]
    fn helpers_count_for_the_layers_that_call_them() -> anyhow::Result<()> {
        let profile = Profile::parse(DUMP, 2)?;
        assert!((profile.all - 50.0).abs() < 1e-9);
        let of = |layer| profile.layers.get(&layer).copied().unwrap_or(0.0);
        assert!((of(Layer::Table) - 37.0).abs() < 1e-9, "{profile:?}");
        assert!((of(Layer::Call) - 13.0).abs() < 1e-9, "{profile:?}");
        Ok(())
    }

    #[test]
    fn instructions_that_are_missing_are_an_error() {
        assert!(Profile::parse(&DUMP.replace("totals: 100", "totals: 140"), 2).is_err());
        assert!(Profile::parse("", 2).is_err());
    }
}
