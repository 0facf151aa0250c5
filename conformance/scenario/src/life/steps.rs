//! What each step does, and what is special to its check.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ioas::{Capability, Observer, Placement, Step as Part, TrackingError, UnmapError, Unsupported};
use iopt::Prot;
use runs::{Bytes, Iova, SizeHistogram, Span};

use super::Life;
use crate::balloon::{Balloon, seen_by_devices, seven_of_eight};
use crate::check::Counted;
use crate::handover::{Hole, Left};
use crate::step::{Done, Refused, Root, count, nodes};
use crate::world::Backend;
use crate::{Error, PAGE, PARTS};

/// The times of an operation's steps.
#[derive(Default)]
struct Split {
    begun: Option<Instant>,
    pin: Duration,
    rest: Duration,
}

impl Observer for Split {
    fn begin(&mut self, _step: Part) {
        self.begun = Some(Instant::now());
    }

    fn end(&mut self, step: Part, _bytes: u64) {
        let taken = self.begun.take().map_or(Duration::ZERO, |at| at.elapsed());
        match step {
            Part::Charge | Part::Pin => self.pin += taken,
            _ => self.rest += taken,
        }
    }

    fn progress(&mut self, _step: Part, _done: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// The page in the middle of `range`.
fn middle(range: Span<Iova>) -> Span<Iova> {
    Span::new(range.start + ((range.len / 2) & !(PAGE - 1)), PAGE)
}

impl Life<'_> {
    /// Attaches the devices and maps all memory: in one piece for each memory, by one charge and one pin, in one
    /// pass for all roots; or in the 16 parts, each a mapping of the kernel's own, so that the balloon can take 7
    /// of 8 although the kernel takes none apart.
    pub(super) fn pin(&mut self) -> Result<Done, Error> {
        let (kernel, size) = (self.over_kernel(), self.size());
        let steps = self.world.ledger.steps();
        let mut split = Split::default();
        for device in 0..self.world.devices() {
            if !self.world.is_attached(device) {
                self.world.attach(device).map_err(Error::Attach)?;
                split.rest += self.world.took();
            }
        }
        let mut all = Duration::ZERO;
        for number in 0..self.world.parts.len() {
            let guest = self.world.parts[number].guest;
            let len = if kernel { size / PARTS } else { guest.len };
            for offset in (0..guest.len).step_by(len as usize) {
                let (iova, part) = (guest.start + offset, Span::new(offset, len));
                let mapped = self.world.map(iova, number, part, Prot::RW, &mut split);
                mapped.map_err(Error::Map)?;
                all += self.world.took();
            }
        }
        self.mapping = split.rest;
        let (steps, pages) = (self.world.ledger.steps() - steps, size / PAGE);
        let (charged, counted) = (self.world.charged(), self.world.kernel()?.most());
        let runs = match &self.world.backend {
            Backend::Own(hardware) => hardware.physical.runs(),
            Backend::Kernel(_) => self.shape().mappings.len() as u64,
        };
        Ok(Done {
            took: if kernel { all } else { split.pin },
            runs,
            bytes: size,
            checked: format!(
                "{steps} charges, not {}; kernel: {}",
                count(pages),
                Bytes(counted)
            ),
            found: format!("{steps} charges"),
            right: charged == size,
            ..Done::default()
        })
    }

    /// Tables for each node, where they are to be, and of two formats: those of a kernel are as it makes them.
    pub(super) fn roots(&mut self) -> Result<Done, Error> {
        let size = self.size();
        let Backend::Own(hardware) = &self.world.backend else {
            let started = Instant::now();
            let placed = place(&self.world.space, self.world.far);
            return Ok(Done {
                took: started.elapsed(),
                checked: "tables unchanged".into(),
                found: "tables unchanged".into(),
                right: placed.is_err(),
                refused: placed.err().map(Refused::from),
                ..Done::default()
            });
        };
        let looked = |_, table: &iopt::AnyTable| (table.root(), table.tables(), table.leaf_sizes());
        let domains = self.world.space.tables(looked);
        let mut right = domains.len() == 2;
        let memories = hardware.tables.iter().enumerate();
        for ((root, tables, sizes), (number, memory)) in domains.into_iter().zip(memories) {
            let largest = sizes.iter().map(|(size, _)| size).max();
            self.largest_leaf = self.largest_leaf.max(largest.unwrap_or(0));
            // Each root in its own node's memory, and all memory in each root.
            let arena = &memory.tables.arena;
            right &= arena.contains(root.address);
            right &= arena.in_use() == tables && sizes.total().bytes == size;
            self.roots.push(Root {
                node: memory.at.node.0,
                nodes: nodes(&memory.file)?,
                format: root.format.name().into(),
                device: hardware.device(number).1.to_string(),
            });
        }
        Ok(Done {
            took: self.mapping,
            runs: hardware.physical.runs() * 2,
            bytes: 2 * size,
            checked: format!(
                "each on its node; leaves up to {}",
                Bytes(self.largest_leaf)
            ),
            found: format!("leaves to {}", Bytes(self.largest_leaf)),
            right,
            ..Done::default()
        })
    }

    /// Devices begin, and are everywhere for the first time, which is the step itself.
    pub(super) fn dma(&mut self) -> Result<Done, Error> {
        let devices = self.world.devices();
        let (begun, checked) = match self.over_kernel() {
            false => (
                self.world.play(devices, 0),
                format!("each of {devices} devices was everywhere"),
            ),
            true => (
                self.world.copy(std::mem::take(&mut self.copies)),
                "each device wrote into each part".into(),
            ),
        };
        begun.map_err(Error::Devices)?;
        let waited = self.waited;
        self.everywhere()?;
        let took = self.waited - waited;
        self.waited = waited;
        let counts = self.world.scene.counts();
        Ok(Done {
            took,
            bytes: counts.read_bytes + counts.written_bytes,
            checked,
            found: match self.over_kernel() {
                false => "all pages reached".into(),
                true => "every part written".into(),
            },
            right: true,
            ..Done::default()
        })
    }

    /// The largest leaf of all roots; or the first mapping of the kernel.
    fn largest(&self) -> Option<Span<Iova>> {
        let mut found: Option<Span<Iova>> = self.shape().mappings.first().copied();
        self.world.space.tables(|_, table| {
            table.for_each_leaf(self.world.range(), |leaf| {
                if found.is_none_or(|found| leaf.run.len > found.len) {
                    found = Some(leaf.run.input());
                }
            });
        });
        found
    }

    /// A page is cut out of the largest leaf, without a moment in which the rest is missing.
    pub(super) fn cut(&mut self) -> Result<Done, Error> {
        let leaf = self.largest().ok_or(Error::NoLeaf)?;
        let range = middle(leaf);
        (self.hole, self.shape) = (range, self.shape());
        let cut = self.world.take_out(range);
        let took = self.world.took();
        let unpinned = match cut {
            Err(UnmapError::CutsMapping { cause, .. }) => return self.refused(cause, took),
            Err(source) => return Err(Error::Cut { range, source }),
            Ok(unpinned) => unpinned,
        };
        self.focus(&[range]);
        self.marks.holes.push(range);
        self.see()?;
        let now = self.shape();
        let mut both = now.leaves.iter().zip(&self.shape.leaves);
        let less = both.all(|(now, before)| now.total().bytes + PAGE == before.total().bytes);
        Ok(Done {
            took,
            runs: 1,
            bytes: PAGE,
            checked: format!(
                "out of a leaf of {}: now {} leaves",
                Bytes(leaf.len),
                count(now.count())
            ),
            found: format!("{} leaves", count(now.count())),
            right: less && unpinned == PAGE && !self.over_kernel(),
            ..Done::default()
        })
    }

    /// What a cut comes to where the back end does none.
    fn refused(&mut self, cause: Unsupported, took: Duration) -> Result<Done, Error> {
        self.see()?;
        Ok(Done {
            took,
            checked: "all reached as before".into(),
            found: "as before".into(),
            right: self.shape() == self.shape,
            refused: Some(cause.into()),
            ..Done::default()
        })
    }

    /// The hole is closed. Where nothing was cut there is nothing to close, and asking for it changes nothing.
    pub(super) fn close(&mut self) -> Result<Done, Error> {
        let (range, cut) = (self.hole, !self.marks.holes.is_empty());
        let back = self.world.put_back(range);
        back.map_err(|source| Error::PutBack { range, source })?;
        let took = self.world.took();
        self.focus(&[]);
        self.marks.holes.clear();
        if cut {
            self.see()?;
        }
        let now = self.shape();
        Ok(Done {
            took,
            runs: u64::from(cut),
            bytes: if cut { PAGE } else { 0 },
            checked: match cut {
                true => format!("leaves as before: {}", count(now.count())),
                false => "nothing was cut: nothing has changed".into(),
            },
            found: match cut {
                true => format!("{} leaves", count(now.count())),
                false => "nothing was cut".into(),
            },
            right: now == self.shape,
            ..Done::default()
        })
    }

    /// Leaves are split for dirty tracking. Devices write into the third eighth of each half from then on: what is
    /// dirty is to be seen.
    pub(super) fn track(&mut self) -> Result<Done, Error> {
        self.shape = self.shape();
        if !self.over_kernel() {
            self.world.scene.quiet().writes = Some(self.hot());
        }
        let tracked = self.world.track(Some(PAGE));
        let took = self.world.took();
        let refused = match tracked {
            Err(TrackingError::Unsupported(cause)) => Some(Refused::from(cause)),
            tracked => tracked.map(|()| None)?,
        };
        self.not_split.clone_from(&refused);
        self.see()?;
        let (now, before) = (self.shape(), self.shape.count());
        if refused.is_some() {
            return Ok(Done {
                took,
                checked: "leaves unchanged".into(),
                found: "leaves unchanged".into(),
                right: now == self.shape && !self.world.space.tracks_dirty(),
                refused,
                ..Done::default()
            });
        }
        let small = |sizes: &SizeHistogram| sizes.iter().all(|(size, _)| size == PAGE);
        Ok(Done {
            took,
            runs: before,
            bytes: 2 * self.size(),
            checked: format!("{} leaves became {}", count(before), count(now.count())),
            found: format!("{} leaves", count(now.count())),
            right: now.leaves.iter().all(small) && !self.over_kernel(),
            ..Done::default()
        })
    }

    fn hot(&self) -> Vec<Span<Iova>> {
        let hot = |part: &crate::Part| {
            let (start, len) = (part.guest.start, part.guest.len);
            Span::new(start + len / 4, len / 8)
        };
        self.world.parts.iter().map(hot).collect()
    }

    /// Dirty pages are harvested, in leaves as they are where none was split. Where a unit cannot tell, all memory
    /// counts as written to.
    pub(super) fn harvest(&mut self) -> Result<Done, Error> {
        match self.world.tracks() {
            true => self.everywhere()?,
            false => {
                self.world.track(None)?;
                self.see()?;
            }
        }
        let split = self.not_split.is_none();
        let (found, failed) = self.world.harvest(self.world.range())?;
        failed.map_or(Ok(()), Err)?;
        let bytes: u64 = found.runs.iter().map(|run| run.len).sum();
        let (missed, more) = (found.missed, found.more);
        let can = self.world.space.capabilities();
        let hot: u64 = self.hot().iter().map(|span| span.len).sum();
        let (refused, checked, short, right) = match found.blind {
            true => {
                let (what, backend) = (Capability::PageDirty, can.backend);
                let checked = format!("{} count as dirty", Bytes(bytes));
                let refused = Refused::from(Unsupported { what, backend });
                let right = bytes == self.size() && !can.page_dirty;
                (Some(refused), checked.clone(), checked, right)
            }
            false => {
                let checked = format!("{missed} writes missed, {more} pages too many");
                let short = format!("{missed} missed, {more} extra");
                (None, checked, short, more == 0 && (!split || bytes == hot))
            }
        };
        if split {
            self.marks.dirty.clone_from(&found.runs);
        }
        Ok(Done {
            took: self.world.took(),
            runs: found.runs.len() as u64,
            bytes,
            checked,
            found: short,
            right: right && missed == 0,
            refused,
            ..Done::default()
        })
    }

    /// Tracking ends, and leaves are merged. What was not split cannot be.
    pub(super) fn merge(&mut self) -> Result<Done, Error> {
        self.world.untrack();
        let took = self.world.took();
        self.marks.dirty.clear();
        self.world.scene.quiet().writes = None;
        self.see()?;
        let (now, refused) = (self.shape(), self.not_split.take());
        let right = now == self.shape && !self.world.space.tracks_dirty();
        Ok(match refused.is_some() {
            true => Done {
                took,
                checked: "nothing to merge".into(),
                found: "nothing to merge".into(),
                right,
                refused,
                ..Done::default()
            },
            false => Done {
                took,
                runs: now.count(),
                bytes: 2 * self.size(),
                checked: format!("leaves as before: {}", count(now.count())),
                found: format!("{} leaves", count(now.count())),
                right,
                ..Done::default()
            },
        })
    }

    /// The balloon takes 7 of 8 parts.
    pub(super) fn inflate(&mut self) -> Result<Done, Error> {
        let mut balloon = Balloon::new(&self.world.parts, self.world.space.clone())?;
        let ballooned = seven_of_eight(&self.world.parts);
        let bytes: u64 = ballooned.iter().map(|span| span.len).sum();
        let (done, _) = self.world.balloon(&ballooned, true, |_| {
            let done = balloon.inflate();
            let discarded = done.as_ref().map_or_else(|_| Vec::new(), Vec::clone);
            (done.map(drop), true, discarded)
        });
        done?;
        let took = self.world.took();
        // Whoever probes a page in the balloon looks at it, and so brings it in again.
        let held = self.held()?;
        self.marks.balloon = seen_by_devices(&ballooned);
        self.focus(&self.marks.balloon);
        self.see()?;
        let counters = balloon.counters();
        self.balloon = Some(balloon);
        Ok(Done {
            took,
            runs: counters.discards,
            bytes: counters.discarded,
            checked: format!(
                "{} still pinned; messages: {}",
                Bytes(held),
                counters.chains
            ),
            found: format!("{} pinned", Bytes(held)),
            right: counters.discarded == bytes && held == self.size() - bytes,
            ..Done::default()
        })
    }

    /// It gives them back.
    pub(super) fn deflate(&mut self) -> Result<Done, Error> {
        self.marks.balloon.clear();
        let ballooned = seven_of_eight(&self.world.parts);
        let Some(mut balloon) = self.balloon.take() else {
            return Ok(Done::default());
        };
        self.focus(&[]);
        let deflate = |_: &_| (balloon.deflate(), true, Vec::new());
        self.world.balloon(&ballooned, false, deflate).0?;
        let took = self.world.took();
        self.everywhere()?;
        let (counters, held) = (balloon.counters(), self.held()?);
        let runs = match &self.world.backend {
            Backend::Own(hardware) => hardware.physical.runs(),
            Backend::Kernel(_) => self.shape().mappings.len() as u64,
        };
        Ok(Done {
            took,
            runs,
            bytes: counters.deflated,
            checked: format!("{} pinned again, zeros found", Bytes(held)),
            found: format!("{} pinned", Bytes(held)),
            right: held == self.size() && counters.not_restored == 0,
            ..Done::default()
        })
    }

    /// The address space goes to a second process, while devices go on.
    pub(super) fn hand_over(&mut self) -> Result<Done, Error> {
        if let Some(why) = self.stays {
            return Ok(Done {
                checked: "stays with this process".into(),
                found: "stays here".into(),
                right: true,
                refused: Some(Refused {
                    capability: None,
                    error: why.into(),
                }),
                ..Done::default()
            });
        }
        let (second, gone) = self.world.hand_over(&self.successor)?;
        let took = self.world.took();
        self.second = Some(second);
        self.everywhere()?;
        let (size, kernel) = (self.size(), self.over_kernel());
        let unpinned = if kernel { size } else { gone.unpinned };
        let there = gone.charged == size && (!kernel || gone.kernel == size);
        Ok(Done {
            took,
            runs: gone.runs,
            bytes: unpinned,
            checked: match kernel {
                true => "charged there, and here no more".into(),
                false => "pinned by both, then by it alone".into(),
            },
            found: match kernel {
                true => "charged there only".into(),
                false => "pinned there only".into(),
            },
            right: unpinned == size && there,
            ..Done::default()
        })
    }

    /// The second process cuts a hole and closes it; or tries to.
    pub(super) fn succeed(&mut self) -> Result<Done, Error> {
        let Some(mut second) = self.second.take() else {
            return Ok(Done {
                checked: "there is no other".into(),
                found: "there is no other".into(),
                right: true,
                ..Done::default()
            });
        };
        let (step, watch, waited) = (self.step, &mut *self.watch, &mut self.waited);
        let hole = self.world.hole_of(&mut second, None, &mut |world| {
            let started = Instant::now();
            let seen = world.scene.see(step, watch);
            *waited += started.elapsed();
            seen
        })?;
        self.second = Some(second);
        let took = self.world.took();
        Ok(match hole {
            Hole::Cut(hole) => Done {
                took,
                runs: 2,
                bytes: hole.len,
                checked: "its own hole cut and closed".into(),
                found: "hole cut, closed".into(),
                right: hole.len == PAGE,
                ..Done::default()
            },
            Hole::Refused(capability, error) => Done {
                took,
                checked: "all reached as before".into(),
                found: "as before".into(),
                right: !capability.is_empty(),
                refused: Some(Refused {
                    capability: Some(capability),
                    error,
                }),
                ..Done::default()
            },
        })
    }

    /// Devices stop, and the owner ends the address space. What is left is looked at.
    pub(super) fn tear_down(&mut self) -> Result<Done, Error> {
        if let Some(why) = self.world.stop() {
            return Err(Error::Device(why));
        }
        match self.second.take() {
            Some(second) => self.left = self.world.end_there(second)?,
            None => {
                let range = self.world.range();
                let done = self.world.unmap(range, |space| space.unmap_all(&mut ()));
                done.map_err(Error::Unmap)?;
            }
        }
        let here = (self.world.charged(), self.world.kernel()?);
        let nothing = self.left == Left::default() && here == (0, Counted::default());
        let checked = match self.over_kernel() {
            true => "all counters at zero",
            false => "all counters of both at zero",
        };
        Ok(Done {
            took: self.world.took(),
            bytes: self.size(),
            checked: checked.into(),
            found: "counters at zero".into(),
            right: nothing && self.world.areas() == 0,
            ..Done::default()
        })
    }
}

/// Tables for each node, and then on a node of the caller's choice: what the kernel's interfaces do not do.
fn place(space: &ioas::Ioas, node: iommu::NodeId) -> Result<(), Unsupported> {
    space.set_placement(Placement::PerNode)?;
    let placed = space.set_placement(Placement::Near(node));
    // Devices that are there stay where they are.
    space.set_placement(Placement::Shared)?;
    placed
}
