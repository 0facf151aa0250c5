//! Record of the mappings of physical memory, by domain.
//!
//! The record knows what each domain has mapped, and for every physical page which domains can
//! write to it, and how often. Both are kept as runs, so that a leaf of 1 GiB costs as little as
//! one of 4 KiB.

use core::fmt;

use runs::{Pa, Run, Span};

use crate::prot::Prot;

/// Domain and owner of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domain {
    /// The domain.
    pub id: u32,
    /// Domains of one owner may write to the same memory: those of one virtual machine, say.
    /// Memory that different owners write to is isolated.
    pub owner: u32,
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "domain {} of owner {}", self.id, self.owner)
    }
}

/// Violation of the record's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A device of one owner can write to memory to which a device of another owner can write.
    #[error("{memory} is writable for {now}, and was for {before} before")]
    SharedWritable {
        /// The physical memory.
        memory: Span<Pa>,
        /// Domain that had mapped it before.
        before: Domain,
        /// Domain that has mapped it now.
        now: Domain,
    },
    /// It was unmapped, but the record knows of no such mapping: its reference is lost.
    #[error("{domain} has unmapped {run}, which it had not mapped")]
    NotMapped {
        /// The unmapped run.
        run: Run,
        /// Domain that has unmapped it.
        domain: Domain,
    },
    /// The tables map what the record does not know of, or knows with other permissions.
    #[error("{domain} maps {run}, which is not recorded")]
    LeafWithoutEntry {
        /// The mapped run.
        run: Run,
        /// Domain that maps it.
        domain: Domain,
    },
    /// The record knows of a mapping that is not in the tables: a reference is lost.
    #[error("{domain} does not map {run}, which is noted")]
    EntryWithoutLeaf {
        /// The recorded run.
        run: Run,
        /// Domain that it is recorded for.
        domain: Domain,
    },
}

/// A record of who maps which memory. It reports what it finds when asked, and refuses no operation.
///
/// With the feature `alloc` there is [`HeapRecord`]; where there is no heap an implementation may
/// keep a cell for each physical page, say.
pub trait MappingRecord {
    /// `domain` maps the run.
    fn mapped(&self, domain: Domain, run: Run, prot: Prot);

    /// `domain` does not map the run any more. With which permissions it did, the record knows.
    fn unmapped(&self, domain: Domain, run: Run);

    /// `leaves` is all that `domain` maps.
    fn compare(&self, domain: Domain, leaves: &mut dyn Iterator<Item = (Run, Prot)>);
}

impl<L: MappingRecord + ?Sized> MappingRecord for &L {
    fn mapped(&self, domain: Domain, run: Run, prot: Prot) {
        (**self).mapped(domain, run, prot);
    }
    fn unmapped(&self, domain: Domain, run: Run) {
        (**self).unmapped(domain, run);
    }
    fn compare(&self, domain: Domain, leaves: &mut dyn Iterator<Item = (Run, Prot)>) {
        (**self).compare(domain, leaves);
    }
}

#[cfg(feature = "alloc")]
pub use heap::{HeapRecord, Violations};

#[cfg(feature = "alloc")]
mod heap {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;
    use core::cell::RefCell;

    use runs::Iova;

    use super::*;

    /// How many violations are kept; the others are counted.
    const KEPT: usize = 64;

    /// A [`MappingRecord`] on the heap: in a `RefCell` for one thread, and with the feature `std` in a
    /// `Mutex` for many.
    #[derive(Clone, Debug, Default)]
    pub struct HeapRecord {
        domains: BTreeMap<Domain, Mappings>,
        writers: Writers,
        violations: Violations,
    }

    /// Violations that a record has found.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct Violations {
        first: Vec<Violation>,
        count: u64,
    }

    impl Violations {
        /// The first of them, in the order in which they were found.
        pub fn first(&self) -> &[Violation] {
            &self.first
        }

        /// How many there were in all.
        pub const fn count(&self) -> u64 {
            self.count
        }

        /// True when all is well.
        pub const fn is_empty(&self) -> bool {
            self.count == 0
        }

        fn push(&mut self, violation: Violation) {
            if self.first.len() < KEPT {
                self.first.push(violation);
            }
            self.count += 1;
        }
    }

    impl HeapRecord {
        /// Nothing is mapped.
        pub const fn new() -> Self {
            Self {
                domains: BTreeMap::new(),
                writers: Writers(BTreeMap::new()),
                violations: Violations {
                    first: Vec::new(),
                    count: 0,
                },
            }
        }

        /// Violations found so far.
        pub const fn violations(&self) -> &Violations {
            &self.violations
        }

        /// Takes the violations found so far; the report begins anew.
        pub fn take_violations(&mut self) -> Violations {
            core::mem::take(&mut self.violations)
        }

        /// Bytes that `domain` maps.
        pub fn mapped_bytes(&self, domain: Domain) -> u64 {
            let mappings = self.domains.get(&domain);
            mappings.map_or(0, |mappings| {
                mappings.0.values().map(|entry| entry.len).sum()
            })
        }

        /// See [`MappingRecord::mapped`].
        pub fn mapped(&mut self, domain: Domain, run: Run, prot: Prot) {
            let Self {
                domains,
                writers,
                violations,
            } = self;
            let mappings = domains.entry(domain).or_default();
            // The engine maps nothing twice: what is in the way was lost before.
            mappings.take(run.input(), |there, entry| {
                if let Some(prot) = entry {
                    writers.remove(domain, there, prot);
                    let run = there;
                    violations.push(Violation::EntryWithoutLeaf { run, domain });
                }
            });
            mappings.put(run, prot);
            if prot.contains(Prot::WRITE) {
                writers.add(domain, run.output(), violations);
            }
        }

        /// See [`MappingRecord::unmapped`].
        pub fn unmapped(&mut self, domain: Domain, run: Run) {
            let Self {
                domains,
                writers,
                violations,
            } = self;
            let mappings = domains.entry(domain).or_default();
            mappings.take(run.input(), |there, entry| {
                if let Some(prot) = entry {
                    writers.remove(domain, there, prot);
                }
                // The same addresses of the same memory, or another mapping than was thought.
                let expected = run.part(there.input());
                if entry.is_none() || there != expected {
                    let run = expected;
                    violations.push(Violation::NotMapped { run, domain });
                }
            });
        }

        /// See [`MappingRecord::compare`].
        pub fn compare(&mut self, domain: Domain, leaves: &mut dyn Iterator<Item = (Run, Prot)>) {
            let mut rest = self.domains.get(&domain).cloned().unwrap_or_default();
            let violations = &mut self.violations;
            for (leaf, prot) in leaves {
                rest.take(leaf.input(), |there, entry| {
                    let run = leaf.part(there.input());
                    if entry != Some(prot) || there != run {
                        violations.push(Violation::LeafWithoutEntry { run, domain });
                        if entry.is_some() {
                            let run = there;
                            violations.push(Violation::EntryWithoutLeaf { run, domain });
                        }
                    }
                });
            }
            for (&iova, entry) in &rest.0 {
                let run = Run::new(iova, Span::new(entry.pa, entry.len));
                violations.push(Violation::EntryWithoutLeaf { run, domain });
            }
        }
    }

    /// Mappings of one domain, by device address.
    #[derive(Clone, Debug, Default)]
    struct Mappings(BTreeMap<u64, Mapping>);

    #[derive(Clone, Copy, Debug)]
    struct Mapping {
        pa: u64,
        len: u64,
        prot: Prot,
    }

    impl Mappings {
        fn put(&mut self, run: Run, prot: Prot) {
            let Run { iova, pa, len } = run;
            self.0.insert(iova, Mapping { pa, len, prot });
        }

        /// Takes out what is mapped in `range`. `each` receives all of the range, piece by piece:
        /// what was mapped there, or, with `None` and no meaning in `pa`, a gap.
        fn take(&mut self, range: Span<Iova>, mut each: impl FnMut(Run, Option<Prot>)) {
            self.split(range.start);
            let last = range.last();
            if last < u64::MAX {
                self.split(last + 1);
            }
            let mut at = range.start;
            let gap = |at: u64, end: u64, each: &mut dyn FnMut(Run, Option<Prot>)| {
                if at < end {
                    each(Run::new(at, Span::new(0, end - at)), None);
                }
            };
            let keys: Vec<u64> = self
                .0
                .range(range.start..=last)
                .map(|(at, _)| *at)
                .collect();
            for iova in keys {
                let Some(Mapping { pa, len, prot }) = self.0.remove(&iova) else {
                    continue;
                };
                gap(at, iova, &mut each);
                each(Run { iova, pa, len }, Some(prot));
                at = iova.saturating_add(len);
            }
            gap(at, last.saturating_add(1), &mut each);
        }

        /// Makes `at` a beginning, if it is mapped.
        fn split(&mut self, at: u64) {
            if let Some((&iova, mapping)) = self.0.range_mut(..at).next_back() {
                if at - iova < mapping.len {
                    let Mapping { pa, len, prot } = *mapping;
                    mapping.len = at - iova;
                    self.put(Run { iova, pa, len }.skip(at - iova), prot);
                }
            }
        }
    }

    /// Writers of physical memory.
    #[derive(Clone, Debug, Default)]
    struct Writers(BTreeMap<u64, Stretch>);

    /// Memory to which the same domains can write, and through how many mappings each.
    #[derive(Clone, Debug)]
    struct Stretch {
        len: u64,
        by: Vec<(Domain, u32)>,
    }

    impl Writers {
        fn add(&mut self, domain: Domain, memory: Span<Pa>, violations: &mut Violations) {
            self.split(memory.start);
            self.split(memory.start + memory.len);
            let mut at = memory.start;
            let end = memory.start + memory.len;
            while at < end {
                let next = self.0.range(at..end).next().map(|(start, _)| *start);
                match next {
                    Some(start) if start == at => {}
                    next => {
                        let len = next.unwrap_or(end) - at;
                        self.0.insert(
                            at,
                            Stretch {
                                len,
                                by: Vec::new(),
                            },
                        );
                    }
                }
                let Some(stretch) = self.0.get_mut(&at) else {
                    return;
                };
                let other = stretch.by.iter().find(|(who, _)| who.owner != domain.owner);
                if let Some(&(before, _)) = other {
                    let memory = Span::new(at, stretch.len);
                    let now = domain;
                    violations.push(Violation::SharedWritable {
                        memory,
                        before,
                        now,
                    });
                }
                match stretch.by.iter_mut().find(|(who, _)| *who == domain) {
                    Some((_, times)) => *times += 1,
                    None => stretch.by.push((domain, 1)),
                }
                at += stretch.len;
            }
        }

        fn remove(&mut self, domain: Domain, run: Run, prot: Prot) {
            if !prot.contains(Prot::WRITE) {
                return;
            }
            let memory = run.output();
            self.split(memory.start);
            self.split(memory.start + memory.len);
            let mut gone = Vec::new();
            for (&at, stretch) in self.0.range_mut(memory.start..memory.start + memory.len) {
                for (who, times) in &mut stretch.by {
                    *times -= u32::from(*who == domain && *times > 0);
                }
                stretch.by.retain(|(_, times)| *times > 0);
                if stretch.by.is_empty() {
                    gone.push(at);
                }
            }
            for at in gone {
                self.0.remove(&at);
            }
        }

        /// Makes `at` a beginning, if a domain can write to it.
        fn split(&mut self, at: u64) {
            if let Some((&start, stretch)) = self.0.range_mut(..at).next_back() {
                if at - start < stretch.len {
                    let (len, by) = (stretch.len - (at - start), stretch.by.clone());
                    stretch.len = at - start;
                    self.0.insert(at, Stretch { len, by });
                }
            }
        }
    }

    macro_rules! record_in {
        ($cell:ty, $record:ident => $lock:expr) => {
            impl MappingRecord for $cell {
                fn mapped(&self, domain: Domain, run: Run, prot: Prot) {
                    let $record = self;
                    $lock.mapped(domain, run, prot);
                }
                fn unmapped(&self, domain: Domain, run: Run) {
                    let $record = self;
                    $lock.unmapped(domain, run);
                }
                fn compare(&self, domain: Domain, leaves: &mut dyn Iterator<Item = (Run, Prot)>) {
                    let $record = self;
                    $lock.compare(domain, leaves);
                }
            }
        };
    }

    record_in!(RefCell<HeapRecord>, record => record.borrow_mut());
    #[cfg(feature = "std")]
    record_in!(
        std::sync::Mutex<HeapRecord>,
        record => record.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    );
}
