//! Random lives of two address spaces over one unit, with three devices that move between them.
//!
//! # The world
//!
//! Two [`Ioas`](ioas::Ioas) over one driver, and so two domains; two `edu` and an NVMe controller, each in one of them or in none;
//! two nodes of the machine as memory, one of which this process shares, so that it is pinned and charged, while the
//! other has fixed runs of 16 KiB. Operations come from the generator that the soak has too, and change the same
//! [`shadow`]. Some meet a command queue that is deaf, or that stops at a command that it does not know; now and
//! then the queue is filled to its last place, or the unit gets another driver.
//!
//! # After each step
//!
//! * Devices read and write at the edges of what has changed, at the first and last bytes of the pages on both sides.
//!   Memory that is mapped is reached, and all other accesses fault: the unit's faults are drained and compared after each access, with
//!   device, address and access where QEMU tells them.
//! * Areas are those of the shadow, and what is charged lies between what it is to be at least and at most.
//! * Now and then every page of both tables leads where the shadow says.
//!
//! An operation that a stopped queue has failed was done in part: the shadow takes over what the areas say then, and
//! after a flush that succeeds everything is held to that.

mod dirty;
mod node;
mod probe;
mod world;

use anyhow::Context as _;

pub(crate) use dirty::dirty;
pub use world::Counts;
use world::World;

use crate::Rig;

/// Steps of a life.
const STEPS: u64 = 150;

/// Lives one life.
pub(crate) fn life(rig: &Rig) -> anyhow::Result<()> {
    let mut world = World::new(rig, 44 + rig.round())?;
    for step in 0..STEPS {
        world
            .step()
            .with_context(|| format!("step {step}: {}", world.last))?;
    }
    world.end()
}
