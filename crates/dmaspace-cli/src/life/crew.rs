//! The devices of a life: threads that never stop, from the first step to the last, and what whoever directs
//! them and they share.
//!
//! What devices may expect is a [`Scene`], which does not change while an access is under way: where the
//! holes are, which of them are sure to fault, and where devices write.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use runs::Span;

use super::LifeError;
use super::frames::write;
use super::report::{DmaCounts, LifeStep};
use super::scene::{Scene, Tally, Written};

/// Bytes of an access.
pub(super) const PAGE: u64 = 4096;
/// How long a device may be without an access before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Is told which step is under way, and may stop the life.
pub(super) type Watch<'w> = dyn FnMut(LifeStep) -> ControlFlow<()> + 'w;

/// Memory, as a kind of device checks it.
pub(super) trait Checked: Send + Sync + 'static {
    /// Accesses of each device by which a change is seen, and accesses into holes while there are some.
    const SEEN: (u64, u64);

    /// `range` was discarded: it reads as zeros. It lies in a hole.
    fn discarded(&self, range: Span);
}

/// What the threads share.
#[derive(Debug)]
pub(super) struct Stage<M> {
    pub(super) memory: M,
    /// What is written to while it is tracked.
    pub(super) noted: Written,
    scene: RwLock<Scene>,
    stop: AtomicBool,
    /// The pass that is wanted.
    pass: AtomicU64,
    tallies: Vec<Tally>,
    failed: Mutex<Option<String>>,
}

impl<M> Stage<M> {
    /// What is so while the guard is held.
    pub(super) fn scene(&self) -> RwLockReadGuard<'_, Scene> {
        self.scene.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Devices are to stop.
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The pass that is wanted.
    pub(super) fn pass(&self) -> u64 {
        self.pass.load(Ordering::Acquire)
    }

    /// A device was everywhere in `pass`. One that was broken off ends with the number of the one before.
    pub(super) fn ended(&self, tally: &Tally, pass: u64) {
        if self.pass.load(Ordering::Relaxed) == pass {
            tally.passed.store(pass, Ordering::Release);
        }
    }

    fn failed(&self) -> Option<String> {
        let failed = self.failed.lock();
        failed.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The devices of a life. Dropped, they stop.
#[derive(Debug)]
pub(super) struct Crew<M: Checked> {
    stage: Arc<Stage<M>>,
    threads: Vec<JoinHandle<()>>,
}

impl<M: Checked> Crew<M> {
    /// So many devices over so many pages, which have not begun.
    pub(super) fn new(memory: M, devices: usize, pages: usize) -> Self {
        let stage = Stage {
            memory,
            noted: Written::new(pages),
            scene: RwLock::default(),
            stop: AtomicBool::new(false),
            pass: AtomicU64::new(0),
            tallies: (0..devices).map(|_| Tally::default()).collect(),
            failed: Mutex::default(),
        };
        Self {
            stage: Arc::new(stage),
            threads: Vec::new(),
        }
    }

    /// Has them begin, each with a number and work of its own, which goes on until they are to stop; an error
    /// where there can be no threads.
    pub(super) fn start<W>(&mut self, work: impl IntoIterator<Item = W>) -> io::Result<()>
    where
        W: FnOnce(&Stage<M>, &Tally, u64) -> Result<(), String> + Send + 'static,
    {
        for (number, work) in work.into_iter().enumerate() {
            let stage = Arc::clone(&self.stage);
            let work = move || {
                let Some(tally) = stage.tallies.get(number) else {
                    return;
                };
                if let Err(why) = work(&stage, tally, number as u64) {
                    *stage.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                }
            };
            self.threads.push(thread::Builder::new().spawn(work)?);
        }
        Ok(())
    }

    /// The memory as they check it.
    pub(super) fn memory(&self) -> &M {
        &self.stage.memory
    }

    /// See [`Scene::moving`].
    pub(super) fn moving(&self, ranges: &[Span]) {
        write(&self.stage.scene).moving(ranges);
    }

    /// See [`Scene::open`].
    pub(super) fn open(&self) {
        write(&self.stage.scene).open();
    }

    /// There are no holes any more.
    pub(super) fn closed(&self) {
        write(&self.stage.scene).holes.clear();
    }

    /// See [`Checked::discarded`].
    pub(super) fn discarded(&self, range: Span) {
        self.stage.memory.discarded(range);
    }

    /// What devices write to is noted anew, and they write nowhere but in `spans`; everywhere without them.
    pub(super) fn note_anew(&self, spans: Option<Vec<Span>>) {
        let mut scene = write(&self.stage.scene);
        self.stage.noted.clear();
        scene.writes = spans;
    }

    /// Devices write everywhere.
    pub(super) fn write_everywhere(&self) {
        write(&self.stage.scene).writes = None;
    }

    /// See [`Written::sure`].
    pub(super) fn written(&self) -> Vec<u64> {
        self.stage.noted.sure()
    }

    /// See [`Written::perhaps`].
    pub(super) fn perhaps_written(&self) -> Vec<u64> {
        self.stage.noted.perhaps()
    }

    /// What they have counted.
    pub(super) fn counts(&self) -> DmaCounts {
        let mut counts = DmaCounts::default();
        for tally in &self.stage.tallies {
            tally.add_to(&mut counts);
        }
        counts
    }

    /// Waits until each device has been everywhere from now on.
    pub(super) fn everywhere(
        &self,
        step: LifeStep,
        watch: &mut Watch<'_>,
    ) -> Result<(), LifeError> {
        let pass = self.stage.pass.fetch_add(1, Ordering::AcqRel) + 1;
        self.wait(step, watch, |_, tally| {
            tally.passed.load(Ordering::Acquire) >= pass
        })
    }

    /// Waits until each device has seen what is now.
    pub(super) fn seen(&self, step: LifeStep, watch: &mut Watch<'_>) -> Result<(), LifeError> {
        let (more, mut more_probes) = M::SEEN;
        if self.stage.scene().holes.is_empty() {
            more_probes = 0;
        }
        let now = |tally: &Tally| {
            let accesses = tally.accesses.load(Ordering::Relaxed);
            (accesses, tally.probes.load(Ordering::Relaxed))
        };
        let before: Vec<_> = self.stage.tallies.iter().map(now).collect();
        self.wait(step, watch, |number, tally| {
            let (accesses, probes) = before.get(number).copied().unwrap_or_default();
            let (now, now_probes) = now(tally);
            now >= accesses + more && now_probes >= probes + more_probes
        })
    }

    /// Waits until every device has `done` it.
    fn wait(
        &self,
        step: LifeStep,
        watch: &mut Watch<'_>,
        done: impl Fn(usize, &Tally) -> bool,
    ) -> Result<(), LifeError> {
        let tallies = &self.stage.tallies;
        let accesses = || -> Vec<u64> {
            let all = tallies.iter().map(|tally| &tally.accesses);
            all.map(|count| count.load(Ordering::Relaxed)).collect()
        };
        let (mut seen, mut since) = (accesses(), Instant::now());
        loop {
            let stopped = watch(step).is_break();
            if let Some(why) = self.stage.failed() {
                return Err(LifeError::Device(why));
            }
            if stopped {
                return Err(LifeError::Interrupted(step));
            }
            let mut all = tallies.iter().enumerate();
            if all.all(|(number, tally)| done(number, tally)) {
                return Ok(());
            }
            let now = accesses();
            if now.iter().zip(&seen).all(|(now, seen)| now > seen) {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > PATIENCE {
                return Err(LifeError::Stuck(step));
            }
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Stops them, and waits for it.
    ///
    /// # Errors
    ///
    /// Why a device had stopped by itself.
    pub(super) fn stop(&mut self) -> Result<(), LifeError> {
        self.stage.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A device that has panicked has counted no pass, so that a wait has told of it.
            let _ = thread.join();
        }
        self.stage
            .failed()
            .map_or(Ok(()), |why| Err(LifeError::Device(why)))
    }
}

impl<M: Checked> Drop for Crew<M> {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}
