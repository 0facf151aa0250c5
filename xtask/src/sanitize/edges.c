// The order that the standard library makes between threads, told to ThreadSanitizer.
//
// The library that comes with the compiler has no sanitizer in it. What of it is generic or inlined is compiled with
// our code, and seen: the atomics of an `Arc`, a lock that nobody else wants. The slow half is not: a lock that
// somebody had to wait for looks as if nobody had taken it, and what it guards like a race. So the linker wraps each
// function of the slow half (`--wrap`), also where the library itself calls it (lld does), and here it says what it
// does: `__tsan_release` is "all that I have done", `__tsan_acquire` "comes before what I do now", for whoever names
// the same address. It is the order of that function and no other, so no race of ours is hidden.
//
// `edges.rs` finds the names, which hold hashes, and defines a macro for each. The arguments are pointers and integers,
// which the compiler passes as C does. Checked with the library of Rust 1.95.

#include <stdbool.h>
#include <stdint.h>

#define WRAPPED(name) __asm__("__wrap_" name)
#define REAL(name) __asm__("__real_" name)

void __tsan_acquire(void *address);
void __tsan_release(void *address);

// Mutex::lock_contended(&self). To give the lock back is inlined.
void real_lock(void *mutex) REAL(MUTEX_LOCK_CONTENDED);
void wrapped_lock(void *mutex) WRAPPED(MUTEX_LOCK_CONTENDED);
void wrapped_lock(void *mutex) {
    real_lock(mutex);
    __tsan_acquire(mutex);
}

// RwLock::read_contended(&self) and write_contended(&self). One of its two words is the state.
void real_read(uint32_t *lock) REAL(RWLOCK_READ_CONTENDED);
void wrapped_read(uint32_t *lock) WRAPPED(RWLOCK_READ_CONTENDED);
void wrapped_read(uint32_t *lock) {
    real_read(lock);
    __tsan_acquire(&lock[0]);
    __tsan_acquire(&lock[1]);
}

void real_write(uint32_t *lock) REAL(RWLOCK_WRITE_CONTENDED);
void wrapped_write(uint32_t *lock) WRAPPED(RWLOCK_WRITE_CONTENDED);
void wrapped_write(uint32_t *lock) {
    real_write(lock);
    __tsan_acquire(&lock[0]);
    __tsan_acquire(&lock[1]);
}

// Condvar::wait(&self, &Mutex) and wait_timeout(&self, &Mutex, Duration) -> bool give the lock back and take it.
void real_wait(void *condvar, void *mutex) REAL(CONDVAR_WAIT);
void wrapped_wait(void *condvar, void *mutex) WRAPPED(CONDVAR_WAIT);
void wrapped_wait(void *condvar, void *mutex) {
    __tsan_release(mutex);
    real_wait(condvar, mutex);
    __tsan_acquire(mutex);
}

bool real_wait_timeout(void *, void *, uint64_t, uint32_t) REAL(CONDVAR_WAIT_TIMEOUT);
bool wrapped_wait_timeout(void *, void *, uint64_t, uint32_t) WRAPPED(CONDVAR_WAIT_TIMEOUT);
bool wrapped_wait_timeout(void *condvar, void *mutex, uint64_t seconds, uint32_t nanoseconds) {
    __tsan_release(mutex);
    bool in_time = real_wait_timeout(condvar, mutex, seconds, nanoseconds);
    __tsan_acquire(mutex);
    return in_time;
}

// Barrier::wait(&self) -> bool: what anybody did before it comes before what anybody does after it.
bool real_barrier(void *barrier) REAL(BARRIER_WAIT);
bool wrapped_barrier(void *barrier) WRAPPED(BARRIER_WAIT);
bool wrapped_barrier(void *barrier) {
    __tsan_release(barrier);
    bool leader = real_barrier(barrier);
    __tsan_acquire(barrier);
    return leader;
}

// Once::call(&self, bool, &mut dyn FnMut(&OnceState)), which may have waited for another thread. What it calls has to
// be released before the Once says that it is done: so it is given a closure around the closure. Of the table of
// methods it uses `call_mut`, the last.
void real_once(void *, bool, void *, void *const *) REAL(ONCE_CALL);
void wrapped_once(void *, bool, void *, void *const *) WRAPPED(ONCE_CALL);
enum { CALL_MUT = 4 };
struct closure {
    void *once;
    void *inner;
    void (*call_mut)(void *inner, void *state);
};

static void call_and_release(struct closure *closure, void *state) {
    closure->call_mut(closure->inner, state);
    __tsan_release(closure->once);
}

void wrapped_once(void *once, bool poisoned, void *inner, void *const *methods) {
    static void *const METHODS[] = {0, (void *)sizeof(struct closure), (void *)8, 0, (void *)call_and_release};
    struct closure closure = {once, inner, (void (*)(void *, void *))methods[CALL_MUT]};
    real_once(once, poisoned, &closure, METHODS);
    __tsan_acquire(once);
}

// The same where that panicked: drop of a CompletionGuard, of which the first field is the address of the Once.
void real_completed(void **guard) REAL(ONCE_COMPLETED);
void wrapped_completed(void **guard) WRAPPED(ONCE_COMPLETED);
void wrapped_completed(void **guard) {
    __tsan_release(*guard);
    real_completed(guard);
}

// ScopeData::decrement_num_running_threads(&self, bool): a thread of a scope has ended. The scope reads the counter,
// one of these three words, by an atomic that is inlined.
void real_ended(uint64_t *scope, bool panicked) REAL(SCOPE_THREAD_ENDED);
void wrapped_ended(uint64_t *scope, bool panicked) WRAPPED(SCOPE_THREAD_ENDED);
void wrapped_ended(uint64_t *scope, bool panicked) {
    for (int word = 0; word < 3; word++)
        __tsan_release(&scope[word]);
    real_ended(scope, panicked);
}

// Arc<thread::Inner>::drop_slow(&mut self): a thread that ends was the last to have its own handle. The counter is
// the first word of what the Arc points to.
void real_forget(void **handle) REAL(THREAD_FORGET);
void wrapped_forget(void **handle) WRAPPED(THREAD_FORGET);
void wrapped_forget(void **handle) {
    __tsan_acquire(*handle);
    real_forget(handle);
}

// Whoever drops the last Arc puts itself behind all others by a fence, and ThreadSanitizer knows no fences. It is
// who counts down to zero by a decrement that releases; none of our own does that.
enum { RELEASE = 3 };
uint64_t real_fetch_sub(volatile uint64_t *, uint64_t, int) REAL("__tsan_atomic64_fetch_sub");
uint64_t wrapped_fetch_sub(volatile uint64_t *, uint64_t, int) WRAPPED("__tsan_atomic64_fetch_sub");
uint64_t wrapped_fetch_sub(volatile uint64_t *count, uint64_t by, int order) {
    uint64_t before = real_fetch_sub(count, by, order);
    if (order == RELEASE && before == by)
        __tsan_acquire((void *)count);
    return before;
}
