package abuse

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strconv"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// process is an agent's process.
type process struct {
	name string
	pid  int
}

// agentsOf returns the running agents, the first agent first. State.Components are in order of
// start.
func agentsOf(state sandbox.State) []process {
	agents := make([]process, len(state.AgentAddresses))
	for i := range agents {
		agents[i].name = sandbox.AgentName(i)
		for _, c := range state.Components {
			if c.Name == agents[i].name {
				agents[i].pid = c.PID
			}
		}
	}
	return agents
}

var residentLine = regexp.MustCompile(`(?m)^(VmRSS|VmHWM):\s+(\d+) kB$`)

// resident returns the process's resident memory in bytes, and its peak since [process.forgetPeak].
func (p process) resident() (now, peak int64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
	if err != nil {
		return 0, 0, err
	}
	for _, line := range residentLine.FindAllSubmatch(status, -1) {
		kib, err := strconv.ParseInt(string(line[2]), 10, 64)
		if err != nil {
			return 0, 0, err
		}
		if string(line[1]) == "VmRSS" {
			now = kib * kibibyte
		} else {
			peak = kib * kibibyte
		}
	}
	return now, peak, nil
}

// forgetPeak resets the peak of the process's memory.
func (p process) forgetPeak() error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.pid), []byte("5"), 0)
}

var databaseLine = regexp.MustCompile(`^etcd_mvcc_db_total_size_in_bytes ([0-9.e+]+)$`)

// databaseSize returns the size in bytes of the hub's etcd database. It never shrinks: etcd reuses
// space that compaction frees.
func databaseSize(ctx context.Context, state sandbox.State) (int64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, state.HubEtcdMetrics, http.NoBody)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if m := databaseLine.FindStringSubmatch(lines.Text()); m != nil {
			size, err := strconv.ParseFloat(m[1], 64)
			return int64(size), err
		}
	}
	return 0, fmt.Errorf("%s does not tell the size of etcd's database", state.HubEtcdMetrics)
}
