//! Processor time, and medians of it.

use std::env;

/// Samples of one figure.
#[derive(Clone, Default)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    pub(crate) fn quantile(&self, of: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * of).round() as usize]
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Median and quartiles.
    pub(crate) fn show(&self, digits: usize) -> String {
        let [low, median, high] = [0.25, 0.5, 0.75].map(|of| self.quantile(of));
        format!("{median:.digits$} ({low:.digits$}–{high:.digits$})")
    }
}

/// Seconds that `f` takes of a processor; others may use the machine meanwhile.
pub(crate) fn timed(f: impl FnOnce()) -> f64 {
    let begun = clock();
    f();
    clock() - begun
}

/// Seconds of processor time of this thread.
pub(crate) fn clock() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid to be written during the call.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0, "there is no clock of the thread");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A number from the environment.
pub(crate) fn number(name: &str, usual: u64) -> u64 {
    let given = env::var(name).ok();
    given.map_or(usual, |number| {
        number
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number"))
    })
}
