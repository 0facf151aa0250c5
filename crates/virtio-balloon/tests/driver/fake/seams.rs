//! The driver's seams, as the fake guest and the fake device have them.

use std::time::Duration;

use runs::{GuestAddr, Span};
use virtio_balloon::driver::{BufferMemory, GuestPages, QueueAddresses, Transport};
use virtio_balloon::{Features, GuestPage, Queue, Stats, Tag};

use super::{ARENA, Answers, Event, Handle, PAGE};

/// Error of the call that was to fail.
pub(crate) const FAULT: &str = "a fault that was put here";

impl Handle {
    /// Fails when it is time.
    fn fault(&self) -> Result<(), String> {
        self.with(|world| match world.until_fault {
            Some(0) => {
                world.until_fault = None;
                Err(FAULT.into())
            }
            left => {
                world.until_fault = left.map(|left| left - 1);
                Ok(())
            }
        })
    }
}

impl Transport for Handle {
    type Error = String;

    fn reset(&mut self) -> Result<(), String> {
        self.fault()?;
        self.with(|world| {
            world.queues.clear();
            world.unanswered.clear();
            world.host.clear();
            world.accepted = None;
            world.stats_kept = false;
            world.log.push(Event::Reset);
        });
        Ok(())
    }

    fn offered(&mut self) -> Result<Features, String> {
        self.fault()?;
        Ok(self.with(|world| world.offered))
    }

    fn accept(&mut self, features: Features) -> Result<bool, String> {
        self.fault()?;
        self.with(|world| {
            assert!(world.offered.contains(features));
            world.accepted = Some(features);
            Ok(!world.refuses)
        })
    }

    fn begin(&mut self) -> Result<(), String> {
        self.fault()?;
        Ok(())
    }

    fn broken(&mut self) -> Result<bool, String> {
        self.fault()?;
        Ok(self.with(|world| world.broken))
    }

    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), String> {
        self.fault()?;
        let all = self.with(|world| world.config.to_bytes());
        bytes.copy_from_slice(&all[usize::from(offset)..][..bytes.len()]);
        Ok(())
    }

    fn generation(&mut self) -> Result<u32, String> {
        self.fault()?;
        Ok(self.with(|world| world.generation))
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), String> {
        self.fault()?;
        self.with(|world| {
            world.config.write(u64::from(offset), &value.to_le_bytes());
            if offset == 4 {
                world.log.push(Event::Actual(value));
            }
        });
        Ok(())
    }

    fn queue_size(&mut self, queue: u16) -> Result<u16, String> {
        self.fault()?;
        Ok(self.with(|world| {
            let features = world.accepted.unwrap();
            Queue::of_number(queue, features, world.numbering).map_or(0, |_| world.queue_size)
        }))
    }

    fn enable_queue(&mut self, queue: u16, size: u16, at: QueueAddresses) -> Result<(), String> {
        self.fault()?;
        self.with(|world| world.queues.insert(queue, (size, at, 0)));
        Ok(())
    }

    fn notify(&mut self, queue: u16) -> Result<(), String> {
        self.fault()?;
        self.with(|world| match world.answers {
            Answers::AtOnce | Answers::Wrong(..) => world.run(queue),
            _ => world.unanswered.push_back(queue),
        });
        Ok(())
    }

    fn wait(&mut self, _queue: u16, most: Duration) -> Result<(), String> {
        self.fault()?;
        self.with(|world| {
            world.waits += 1;
            world.now += most.min(Duration::from_millis(1));
            if matches!(world.answers, Answers::Late(after) if world.waits >= after) {
                world.waits = 0;
                while let Some(number) = world.unanswered.pop_front() {
                    world.run(number);
                }
            }
        });
        Ok(())
    }

    fn now(&mut self) -> Duration {
        self.with(|world| world.now)
    }

    fn pause(&mut self, time: Duration) {
        self.with(|world| {
            world.now += time;
            world.log.push(Event::Paused(time));
        });
    }
}

/// One call less is left; false when there was none.
fn one_less(left: &mut usize) -> bool {
    *left = left.wrapping_sub(1);
    if *left == usize::MAX {
        *left = 0;
        return false;
    }
    true
}

impl BufferMemory for Handle {
    type Error = String;
    type Words = Vec<u64>;
    type Bytes = Vec<u8>;

    fn words(&mut self, count: usize) -> Option<Vec<u64>> {
        self.with(|world| one_less(&mut world.words).then(|| vec![0; count]))
    }

    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        self.with(|world| one_less(&mut world.bytes).then(|| vec![0; count]))
    }

    fn allocate(&mut self, len: u64) -> Option<u64> {
        self.with(|world| {
            if !one_less(&mut world.shared) || len > 16 << 10 && !world.large {
                return None;
            }
            if world.live.is_empty() {
                world.bump = 0;
            }
            let address = ARENA + world.bump;
            world.bump += len.next_multiple_of(PAGE);
            world.live.insert(address, len);
            world.put(address, &vec![0; len as usize]);
            Some(address)
        })
    }

    fn free(&mut self, memory: Span<GuestAddr>) {
        self.with(|world| assert_eq!(world.live.remove(&memory.start), Some(memory.len)));
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.fault()?;
        self.with(|world| bytes.copy_from_slice(world.bytes_at(address, bytes.len())));
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.fault()?;
        self.with(|world| world.put(address, bytes));
        Ok(())
    }

    fn load(&self, address: u64) -> Result<u16, String> {
        self.fault()?;
        Ok(self.with(|world| world.word(address, 2) as u16))
    }

    fn store(&self, address: u64, value: u16) -> Result<(), String> {
        self.fault()?;
        self.with(|world| world.put(address, &value.to_le_bytes()));
        Ok(())
    }

    fn fence(&self) {}
}

impl GuestPages for Handle {
    fn page(&self) -> GuestPage {
        self.with(|world| world.page)
    }

    fn span(&self) -> Span<GuestAddr> {
        self.with(|world| world.span)
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        self.with(|world| {
            world.log.push(Event::Asked(bytes));
            let step = world.page.bytes();
            let pages = |start: u64| (start..start + bytes).step_by(step as usize);
            let fits = |start: &&u64| {
                **start % bytes == 0 && pages(**start).all(|page| world.free.contains(&page))
            };
            let start = *world.free.iter().find(fits)?;
            for page in pages(start) {
                world.free.remove(&page);
                world.taken.insert(page);
            }
            Some(start)
        })
    }

    fn give_back(&mut self, run: Span<GuestAddr>) {
        self.with(|world| {
            world.log.push(Event::GivenBack(run));
            let pages = (run.start..run.start + run.len).step_by(world.page.bytes() as usize);
            for page in pages {
                assert!(!world.host.contains(&page), "{page:#x} is the host's still");
                assert!(world.taken.remove(&page), "{page:#x} was never taken");
                world.initialized.remove(&page);
                world.free.insert(page);
            }
        });
    }

    fn counted(&mut self, run: Span<GuestAddr>, held: bool, managed: bool) {
        let bytes = if held {
            -(run.len as i64)
        } else {
            run.len as i64
        };
        self.with(|world| world.managed += if managed { bytes } else { 0 });
    }

    fn initialized(&mut self, run: Span<GuestAddr>) {
        self.with(|world| {
            assert!(
                run.is_aligned(world.page.bytes()) && !run.is_empty(),
                "{run}"
            );
            for page in (run.start..run.start + run.len).step_by(world.page.bytes() as usize) {
                assert!(world.taken.contains(&page), "{page:#x} was never taken");
                assert!(world.host.contains(&page), "{page:#x} was never told");
                world.initialized.insert(page);
            }
        });
    }

    fn stats(&mut self) -> Stats {
        let mut stats = Stats::default();
        let free = self.with(|world| world.free.len() as u64 * PAGE);
        stats.set(Tag::FreeMemory, free);
        stats
    }
}
