//! Each call of a queue fails once: registers, rings, buffers, the configuration space.

use crate::fake::{FAULT, Faked, Handle, PAGE, world};
use virtio_balloon::BalloonDriver;
use virtio_balloon::driver::{DriverError, DriverSettings};

type Step = fn(&mut Faked) -> Result<(), DriverError<String>>;

/// A life: in, partly out, asleep and awake, and in again.
const LIFE: [Step; 6] = [
    |driver| driver.inflate(48 * PAGE).map(drop),
    |driver| driver.deflate(16 * PAGE).map(drop),
    |driver| driver.freeze(),
    |driver| driver.restore(),
    |driver| driver.inflate(8 * PAGE).map(drop),
    |driver| driver.freeze(),
];

/// How far it came: the step whose call failed, if one did.
fn live(world: &Handle, settings: DriverSettings) -> Result<(), (usize, DriverError<String>)> {
    let seams = || world.clone();
    let mut driver = BalloonDriver::new(seams(), seams(), seams(), settings);
    let driver = match &mut driver {
        Ok(driver) => driver,
        Err(error) => return Err((0, error.clone())),
    };
    for (step, work) in (1..).zip(LIFE) {
        if let Err(error) = work(driver) {
            // A message may be with the device; once that was reset, the same driver goes on.
            driver.freeze().unwrap();
            driver.restore().unwrap();
            driver.inflate(32 * PAGE).unwrap();
            world.with(|world| assert_eq!(world.host, world.taken, "told and taken"));
            driver.freeze().unwrap();
            return Err((step, error));
        }
    }
    Ok(())
}

#[test]
fn each_call_that_fails_once_is_reported_and_no_page_is_lost_or_given_back_too_early() {
    for (bulk, init) in [(false, false), (false, true), (true, false)] {
        let mut failed = [0; LIFE.len() + 1];
        for nth in 0.. {
            let mut world = world(0..64);
            if bulk {
                world = world.bulk();
            }
            if init {
                world = world.init();
            }
            let settings = DriverSettings {
                init_on_inflate: world.with(|world| init.then_some(world.init)),
                ..DriverSettings::default()
            };
            world.with(|world| world.until_fault = Some(nth));
            let lived = live(&world, settings);
            // In each case the fake guest has every page again, and none before the device let go.
            world.nothing_is_left();
            world.with(|world| assert_eq!(world.free.len(), 64, "bulk {bulk} init {init} {nth}"));
            match lived {
                Err((step, DriverError::Seam(said))) if said == FAULT => failed[step] += 1,
                // The last messages before a reset may get lost: the reset takes everything back.
                Ok(()) if world.with(|world| world.until_fault.is_none()) => {}
                Ok(()) => break,
                other => panic!("bulk {bulk} init {init} {nth}: {other:?}"),
            }
        }
        assert!(
            failed.iter().all(|count| *count > 0),
            "bulk {bulk} init {init} {failed:?}"
        );
    }
}
