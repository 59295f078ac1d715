package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// resources are what a process has used since it began.
type resources struct {
	CPU    time.Duration
	Allocs uint64 // objects on the heap
}

func ownResources() resources {
	var ru syscall.Rusage
	// Can't fail for the process itself.
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	return resources{CPU: time.Duration(ru.Utime.Nano() + ru.Stime.Nano()), Allocs: mem.Mallocs}
}

func (r resources) plus(s resources) resources {
	return resources{CPU: r.CPU + s.CPU, Allocs: r.Allocs + s.Allocs}
}

func (r resources) minus(s resources) resources {
	return resources{CPU: r.CPU - s.CPU, Allocs: r.Allocs - s.Allocs}
}

// The server's process prints its address, and then its resources for every line
// that it reads. It ends with its input.

// serveProcess is the server's process.
func serveProcess(ctx context.Context, o options, stdin io.Reader, stdout io.Writer) error {
	t, err := transportNamed(o.serve, o)
	if err != nil {
		return err
	}
	s, err := startServer(ctx, t, o.address)
	if err != nil {
		return err
	}
	out := json.NewEncoder(stdout)
	if err := out.Encode(s.l.Addr().String()); err != nil {
		return errors.Join(err, s.close())
	}
	in := bufio.NewScanner(stdin)
	for in.Scan() {
		if err := out.Encode(ownResources()); err != nil {
			break
		}
	}
	return s.close()
}

// process is the client's view of a server's process.
type process struct {
	addr  string
	cmd   *exec.Cmd
	kill  context.CancelFunc
	stdin io.WriteCloser
	out   *json.Decoder
}

const closeTime = 5 * time.Second // for the process to end, before it is killed

func startProcess(ctx context.Context, o options, kind string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := o.serverArgs(self, kind)
	life, kill := context.WithCancel(context.WithoutCancel(ctx)) // close ends it, in order
	p := &process{cmd: exec.CommandContext(life, args[0], args[1:]...), kill: kill}
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // ^C is for the client
	p.cmd.WaitDelay = time.Second
	if err := p.start(ctx); err != nil {
		kill()
		return nil, fmt.Errorf("server process %s: %w", args[0], err)
	}
	return p, nil
}

// start returns when the server listens.
func (p *process) start(ctx context.Context) (err error) {
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	p.out = json.NewDecoder(stdout)
	if err := p.cmd.Start(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, p.kill)
	defer stop()
	if err := p.out.Decode(&p.addr); err != nil {
		return errors.Join(fmt.Errorf("no address: %w", err), p.close())
	}
	return nil
}

func (p *process) resources() (r resources, err error) {
	if _, err := io.WriteString(p.stdin, "\n"); err != nil {
		return r, fmt.Errorf("server process: %w", err)
	}
	if err := p.out.Decode(&r); err != nil {
		return r, fmt.Errorf("server process: %w", err)
	}
	return r, nil
}

func (p *process) close() error {
	defer p.kill()
	p.stdin.Close()
	defer time.AfterFunc(closeTime, p.kill).Stop()
	return p.cmd.Wait()
}
