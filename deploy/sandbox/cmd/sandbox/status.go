package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// errNotReady sets the exit status without another message.
var errNotReady = errors.New("not ready")

// tellStatus prints the status. The error is errNotReady unless everything is ready.
func tellStatus(out io.Writer, options sandbox.Options, asJSON bool) error {
	running, err := sandbox.Running(options)
	if err != nil {
		return err
	}
	state, err := sandbox.ReadState(options)
	if errors.Is(err, sandbox.ErrNoState) || err == nil && !running && state.Phase != sandbox.Failed {
		_, _ = fmt.Fprintf(out, "Sandbox %q is not running.\n", options.Name)
		return errNotReady
	} else if err != nil {
		return err
	}
	ready := state.Phase == sandbox.Ready && lo.EveryBy(state.Components, func(c sandbox.ComponentStatus) bool { return c.Ready })
	if asJSON {
		data, err := json.MarshalIndent(state, "", "  ")
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintln(out, string(data))
	} else {
		_, _ = fmt.Fprintf(out, "Sandbox %q: %s", state.Name, state.Phase)
		if state.Phase == sandbox.Failed {
			_, _ = fmt.Fprintf(out, ": %s\n", state.Error)
		} else {
			_, _ = fmt.Fprintf(out, ", started %s ago, process %d\n\n", time.Since(state.StartedAt).Round(time.Second), state.PID)
			tellComponents(out, state)
			_, _ = fmt.Fprintln(out)
			tellWhatNext(out, state)
		}
	}
	if !ready {
		return errNotReady
	}
	return nil
}

func tellComponents(out io.Writer, state sandbox.State) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "COMPONENT\tPID\tREADY\tRESTARTS\tAGE\tLISTENS ON")
	for _, c := range state.Components {
		pid, age, listens := "-", "-", "-"
		if c.PID != 0 {
			pid, age = strconv.Itoa(c.PID), time.Since(c.StartedAt).Round(time.Second).String()
			if listeners, err := sandbox.Listeners(c.PID); err == nil {
				listens = strings.Join(lo.Map(listeners, func(l netip.AddrPort, _ int) string { return l.String() }), " ")
			}
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%t\t%d\t%s\t%s\n", c.Name, pid, c.Ready, c.Restarts, age, listens)
	}
	_ = table.Flush()
}
