package iwarp

// fifo is a queue of fixed capacity.
type fifo[T any] struct {
	buf     []T
	head, n int
}

func (f *fifo[T]) full() bool { return f.n == len(f.buf) }

// push returns the place of a new last entry. The queue must not be full.
func (f *fifo[T]) push() *T {
	f.n++
	return &f.buf[(f.head+f.n-1)%len(f.buf)]
}

// front returns the oldest entry. There must be one.
func (f *fifo[T]) front() *T { return &f.buf[f.head] }

func (f *fifo[T]) pop() {
	var none T
	f.buf[f.head] = none
	f.head = (f.head + 1) % len(f.buf)
	f.n--
}

func (f *fifo[T]) clear() {
	for f.n > 0 {
		f.pop()
	}
}
