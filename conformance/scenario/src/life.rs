//! The life of a virtual machine's memory: each step once, in order, over any back end.
//!
//! What a back end cannot do is tried all the same. Its refusal, by name, is what comes of the step then, and
//! nothing may have changed.

mod steps;

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use iopt::walk::{Access, Walker};
use runs::{Iova, Run, SizeHistogram, Span};

use crate::balloon::Balloon;
use crate::handover::{Left, Second};
use crate::scene::{Play, Watch};
use crate::step::{Done, Marks, Refused, Root, Step};
use crate::world::{Backend, World};
use crate::{Error, Halves, PAGE};

/// Leaves by size of each root; or the kernel's mappings, which tells no leaves.
#[derive(Clone, Debug, Default, PartialEq)]
struct Shape {
    leaves: Vec<SizeHistogram>,
    mappings: Vec<Span<Iova>>,
}

impl Shape {
    fn count(&self) -> u64 {
        self.leaves.iter().map(|sizes| sizes.total().count).sum()
    }
}

/// A device of the machine, which is given the memory to copy.
pub type Copies = Box<dyn FnOnce(Halves) -> Play>;

/// A life under way. Dropped half-way it gives everything back.
pub struct Life<'w> {
    // The second process ends before what it has is taken away.
    second: Option<Second>,
    balloon: Option<Balloon>,
    /// What it is about.
    pub world: World,
    /// The devices of the machine; where there are none, those of the software unit do DMA.
    pub copies: Vec<Copies>,
    /// The program that takes over, and its arguments.
    pub successor: Vec<OsString>,
    /// Why the address space does not go to another process, if so.
    pub stays: Option<&'static str>,
    /// Besides the tables.
    pub marks: Marks,
    /// The page tables.
    pub roots: Vec<Root>,
    /// Bytes of the largest leaf.
    pub largest_leaf: u64,
    /// What the second process has left.
    pub left: Left,
    /// Waiting until devices have seen what a step changed.
    pub waited: Duration,
    shape: Shape,
    hole: Span<Iova>,
    mapping: Duration,
    not_split: Option<Refused>,
    /// Complaints that were reported.
    reported: usize,
    step: Step,
    watch: &'w mut Watch<'w>,
}

impl<'w> Life<'w> {
    /// In `world`, of which the memory is there. `watch` is told which step is under way, again and again;
    /// [`ControlFlow::Break`] stops the life.
    pub fn new(
        world: World,
        successor: Vec<OsString>,
        watch: &'w mut dyn FnMut(Step) -> ControlFlow<()>,
    ) -> Self {
        Self {
            second: None,
            balloon: None,
            world,
            copies: Vec::new(),
            successor,
            stays: None,
            marks: Marks::default(),
            roots: Vec::new(),
            largest_leaf: 0,
            left: Left::default(),
            waited: Duration::ZERO,
            shape: Shape::default(),
            hole: Span::default(),
            mapping: Duration::ZERO,
            not_split: None,
            reported: 0,
            step: Step::Memory,
            watch,
        }
    }

    /// Does a step that comes after [`Step::Memory`], and checks what came of it.
    ///
    /// # Errors
    ///
    /// Why it cannot be done; [`Error::Interrupted`].
    pub fn step(&mut self, step: Step) -> Result<Done, Error> {
        self.step = step;
        if (self.watch)(step).is_break() {
            return Err(Error::Interrupted(step));
        }
        let flushes = self.flushes();
        let mut done = match step {
            Step::Memory => Ok(Done::default()),
            Step::Pin => self.pin(),
            Step::Roots => self.roots(),
            Step::Dma => self.dma(),
            Step::Hole => self.cut(),
            Step::Close => self.close(),
            Step::Track => self.track(),
            Step::Harvest => self.harvest(),
            Step::Merge => self.merge(),
            Step::Inflate => self.inflate(),
            Step::Deflate => self.deflate(),
            Step::HandOver => self.hand_over(),
            Step::Successor => self.succeed(),
            Step::TearDown => self.tear_down(),
        }?;
        done.flushes = self.flushes() - flushes;
        done.tables = self.tables();
        if self.second.is_none() {
            self.world.check()?;
        }
        let complaints = self.world.scene.complaints();
        if let Some(complaint) = complaints.get(self.reported) {
            done.checked.clone_from(complaint);
        }
        self.reported = complaints.len();
        done.right &= complaints.is_empty() && self.world.scene.counts().is_right();
        done.step = step;
        Ok(done)
    }

    fn flushes(&self) -> u64 {
        match &self.world.backend {
            Backend::Own(hardware) => hardware.flushes(),
            Backend::Kernel(_) => 0,
        }
    }

    /// Table pages of all roots, whoever owns them.
    fn tables(&self) -> u64 {
        let told = match &self.world.backend {
            Backend::Own(hardware) => hardware.told,
            Backend::Kernel(_) => None,
        };
        let ours = || self.world.space.tables(|_, table| table.tables());
        told.unwrap_or_else(|| ours().iter().sum())
    }

    const fn over_kernel(&self) -> bool {
        matches!(self.world.backend, Backend::Kernel(_))
    }

    fn size(&self) -> u64 {
        self.world.range().len
    }

    /// Waits until each device has been everywhere.
    fn everywhere(&mut self) -> Result<(), Error> {
        let started = Instant::now();
        let seen = self.world.scene.everywhere(self.step, self.watch);
        self.waited += started.elapsed();
        seen
    }

    /// Waits until what is now has been seen by each device.
    fn see(&mut self) -> Result<(), Error> {
        let started = Instant::now();
        let seen = self.world.scene.see(self.step, self.watch);
        self.waited += started.elapsed();
        seen
    }

    fn focus(&self, on: &[Span<Iova>]) {
        self.world.scene.quiet().focus = on.to_vec();
    }

    fn shape(&self) -> Shape {
        Shape {
            leaves: self.world.space.tables(|_, table| table.leaf_sizes()),
            mappings: self.world.space.kernel_mappings().unwrap_or_default(),
        }
    }

    /// Bytes that are held: by the pins of the memories, or as the kernel counts them.
    fn held(&self) -> Result<u64, Error> {
        let parts = self.world.parts.iter();
        Ok(match self.over_kernel() {
            false => parts.map(|part| part.memory.held()).sum(),
            true => self.world.kernel()?.most(),
        })
    }

    /// How many page tables there are now, whoever owns them.
    pub fn mapped_roots(&self) -> usize {
        match &self.world.backend {
            Backend::Own(hardware) => hardware.roots.len(),
            Backend::Kernel(_) => 0,
        }
    }

    /// Each root's leaves in `range`, in order, by the independent walker.
    pub fn leaves(&self, root: usize, range: Span<Iova>, on: &mut dyn FnMut(Run)) {
        let Backend::Own(hardware) = &self.world.backend else {
            return;
        };
        let root = hardware.roots.get(root);
        let Some((root, view)) = root.and_then(|(_, root)| Some((root, hardware.view(root)?)))
        else {
            return;
        };
        let walker = Walker::new(*root);
        let mut iova = range.start;
        while range.contains(iova) {
            iova = match walker.walk(view, iova, Access::Read, &mut ()) {
                Ok(found) => {
                    on(found.page);
                    found.page.iova + found.page.len
                }
                Err(_) => iova + PAGE,
            };
        }
    }
}
