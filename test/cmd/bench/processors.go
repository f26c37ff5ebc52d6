package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// tick is the unit of CPU times in /proc: 1/100 s on every Linux that Go supports.
const tick = 10 * time.Millisecond

// shown are the components that do the work.
var shown = []string{sandbox.HubAPIServer, sandbox.HubEtcd, sandbox.ClusterAPI, sandbox.SimProvider, sandbox.Agent}

// processors are CPU times by component. Unlike elapsed time, they hardly depend on other load on
// the machine.
type processors map[string]time.Duration

// used returns the CPU times of the sandbox's components since they started, or none on systems
// without /proc.
func used(s *sandbox.Sandbox) processors {
	times := processors{}
	for _, component := range s.State().Components {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", component.PID))
		if err != nil {
			continue
		}
		// After the name, which is in parentheses, user and system time are the 12th and 13th
		// fields.
		_, fields, _ := strings.Cut(string(stat), ") ")
		var user, system int
		if f := strings.Fields(fields); len(f) > 12 {
			_, _ = fmt.Sscan(f[11], &user) // zero if it is not a number
			_, _ = fmt.Sscan(f[12], &system)
		}
		times[component.Name] = time.Duration(user+system) * tick
	}
	return times
}

// per formats the times per round.
func (p processors) per(rounds int) string {
	n := time.Duration(rounds)
	parts := lo.Map(shown, func(name string, _ int) string { return fmt.Sprintf("%s %.1f", name, (p[name] / n).Seconds()) })
	return fmt.Sprintf("%.1f (%s)", (lo.Sum(lo.Values(p)) / n).Seconds(), strings.Join(parts, ", "))
}
