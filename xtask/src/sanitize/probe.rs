//! A program that tries the sanitizers before the suites do: `ordered` is free of errors, and uses all that
//! `edges.c` tells of; `race` and `outside` are errors that have to be seen. Compiled by `probe` of `mod.rs`.

use std::hint::black_box;
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Barrier, Condvar, Mutex, OnceLock, RwLock};
use std::thread;
use std::time::Duration;

/// A word that is accessed without a word about it.
static mut PLAIN: u64 = 0;

fn touch() {
    // SAFETY: whoever calls this orders it, but for `race`, which is here to be found.
    unsafe { *(&raw mut PLAIN) += 1 };
}

/// Runs `f` in four threads, which gets the number of its thread.
fn four(f: impl Fn(u64) + Sync) {
    thread::scope(|scope| {
        for number in 0..4 {
            let f = &f;
            scope.spawn(move || f(number));
        }
    });
    // The end of the scope is an order too.
    touch();
}

fn ordered() {
    let mutex = Mutex::new(());
    four(|_| {
        for _ in 0..5000 {
            let _held = mutex.lock().unwrap();
            touch();
        }
    });

    let lock = RwLock::new(vec![0]);
    four(|number| {
        for n in 0..5000 {
            if number % 2 == 0 {
                *lock.write().unwrap() = vec![n];
            } else {
                black_box(lock.read().unwrap()[0]);
            }
        }
    });

    // Whose turn it is.
    let turn = (Mutex::new(0), Condvar::new());
    four(|number| {
        for _ in 0..300 {
            let mut held = turn.0.lock().unwrap();
            while *held % 4 != number {
                held = if number == 0 {
                    turn.1.wait(held).unwrap()
                } else {
                    let long = Duration::from_secs(1);
                    turn.1.wait_timeout(held, long).unwrap().0
                };
            }
            *held += 1;
            turn.1.notify_all();
        }
    });

    let barrier = Barrier::new(4);
    four(|number| {
        for n in 0..400 {
            if n % 4 == number {
                touch();
            }
            barrier.wait();
        }
    });

    for _ in 0..300 {
        let once = OnceLock::new();
        four(|_| assert_eq!(once.get_or_init(|| vec![7; 9]).len(), 9));
    }

    for _ in 0..300 {
        let shared = Arc::new(vec![1, 2, 3]);
        let threads: Vec<_> = (0..3).map(|_| Arc::clone(&shared)).collect();
        let threads: Vec<_> = threads
            .into_iter()
            .map(|shared| thread::spawn(move || black_box(shared[1])))
            .collect();
        drop(shared);
        for thread in threads {
            thread.join().unwrap();
        }
    }

    let (many, received) = channel();
    let (few, three) = sync_channel(3);
    let (none, one) = sync_channel(0);
    thread::scope(|scope| {
        scope.spawn(move || received.iter().for_each(|sent: Vec<u64>| drop(sent)));
        scope.spawn(move || three.iter().for_each(|sent: Vec<u64>| drop(sent)));
        scope.spawn(move || one.iter().for_each(|sent: Vec<u64>| drop(sent)));
        for _ in 0..2 {
            let (many, few, none) = (many.clone(), few.clone(), none.clone());
            scope.spawn(move || {
                for n in 0..2000 {
                    many.send(vec![n]).unwrap();
                    few.send(vec![n]).unwrap();
                    none.send(vec![n]).unwrap();
                }
            });
        }
        drop((many, few, none));
    });
}

/// Each has a lock, but not the same one.
fn race() {
    thread::scope(|scope| {
        // To drop the handle of a thread that has ended would be an order.
        let _running = [Mutex::new(()), Mutex::new(())].map(|mutex| {
            scope.spawn(move || {
                for _ in 0..5000 {
                    let _held = mutex.lock().unwrap();
                    touch();
                }
            })
        });
    });
}

fn outside() {
    let words = black_box(vec![0u64; 4]);
    // SAFETY: none, it is here to be found.
    black_box(unsafe { words.as_ptr().add(4).read() });
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("ordered") => ordered(),
        Some("race") => race(),
        Some("outside") => outside(),
        _ => unreachable!("ordered, race or outside"),
    }
}
