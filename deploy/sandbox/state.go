package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/process"
)

// Phase is where a sandbox is in its life.
type Phase string

// The phases, in order. A sandbox that failed has been stopped already.
const (
	Starting Phase = "Starting"
	Ready    Phase = "Ready"
	Stopping Phase = "Stopping"
	Failed   Phase = "Failed"
)

// State is what is known of a sandbox. It is kept in state.json.
type State struct {
	Name  string `json:"name"`
	Phase Phase  `json:"phase"`
	// Error is why it failed.
	Error string `json:"error,omitempty"`
	// Cluster is the name of the spoke's Cluster in the namespace [ClusterNamespace]; empty without a spoke.
	Cluster string `json:"cluster,omitempty"`
	// PID is the process that holds it.
	PID int `json:"pid"`
	// StartedAt is when it was asked for; ReadyAt when it was first ready, zero before.
	StartedAt time.Time `json:"startedAt"`
	ReadyAt   time.Time `json:"readyAt,omitzero"`
	// Steps of the start, in the order they began. Some run at the same time.
	Steps []Step `json:"steps"`
	// Components in the order they were started.
	Components []ComponentStatus `json:"components"`
	// AgentAddress is the host:port at which the agent serves gRPC; empty without an agent.
	AgentAddress string `json:"agentAddress,omitempty"`
	// AgentAddresses are those of all agents; the first is AgentAddress.
	AgentAddresses []string `json:"agentAddresses,omitempty"`
	// AgentMetrics is the URL of the agent's metrics; empty without an agent.
	AgentMetrics string `json:"agentMetrics,omitempty"`
	// HubEtcdMetrics is the URL of the metrics of the hub's etcd.
	HubEtcdMetrics string `json:"hubEtcdMetrics,omitempty"`
	// ShimMetrics is the URL of the shim's metrics; empty without a shim.
	ShimMetrics string `json:"shimMetrics,omitempty"`
	// Paths of the files that its users need.
	Paths Paths `json:"paths"`
}

// Step is one thing that the start waits for.
type Step struct {
	Name      string    `json:"name"`
	StartedAt time.Time `json:"startedAt"`
	// DoneAt is zero while it runs.
	DoneAt time.Time `json:"doneAt,omitzero"`
	// Error is why it failed; empty if it succeeded or runs.
	Error string `json:"error,omitempty"`
}

// ComponentStatus is what is known of a component.
type ComponentStatus = process.Status

// Paths are the files of a sandbox.
type Paths struct {
	// Dir holds all of it.
	Dir string `json:"dir"`
	// HubKubeconfig and SpokeKubeconfig are an administrator's. Without a spoke there is no SpokeKubeconfig. HubKubeconfig is another sandbox's
	// with [Options].HubOf.
	HubKubeconfig   string `json:"hubKubeconfig"`
	SpokeKubeconfig string `json:"spokeKubeconfig"`
	// AgentCA is the authority of the agent's certificate.
	AgentCA string `json:"agentCA"`
	// ClientCertificate and ClientKey identify the spoke's Cluster to the agent, for people and tools. The shim has a certificate of its own.
	ClientCertificate string `json:"clientCertificate"`
	ClientKey         string `json:"clientKey"`
	// AdminCertificate and AdminKey identify an administrator of the agent.
	AdminCertificate string `json:"adminCertificate"`
	AdminKey         string `json:"adminKey"`
	// ReaderCertificate and ReaderKey identify somebody who may read everything.
	ReaderCertificate string `json:"readerCertificate"`
	ReaderKey         string `json:"readerKey"`
	// Env is a file for a shell to source: it sets the paths and addresses of this struct as variables.
	Env string `json:"env"`
	// Logs holds one file per component.
	Logs string `json:"logs"`
	// HubAudit is the audit log of the hub's API server, if it was asked for: one audit.k8s.io/v1 Event a line, and those of
	// changes to MachineDeployments with what was sent.
	HubAudit string `json:"hubAudit"`
}

// clientCertificate names the files of [Paths].ClientCertificate.
const clientCertificate = "spoke"

func pathsIn(dir string) Paths {
	certs, logs := filepath.Join(dir, "certs"), filepath.Join(dir, "logs")
	return Paths{
		Dir:               dir,
		HubKubeconfig:     filepath.Join(dir, "hub.kubeconfig"),
		SpokeKubeconfig:   filepath.Join(dir, "spoke.kubeconfig"),
		AgentCA:           filepath.Join(certs, "agent-ca.crt"),
		ClientCertificate: filepath.Join(certs, clientCertificate+".crt"),
		ClientKey:         filepath.Join(certs, clientCertificate+".key"),
		AdminCertificate:  filepath.Join(certs, "admin.crt"),
		AdminKey:          filepath.Join(certs, "admin.key"),
		ReaderCertificate: filepath.Join(certs, "reader.crt"),
		ReaderKey:         filepath.Join(certs, "reader.key"),
		Env:               filepath.Join(dir, "env"),
		Logs:              logs,
		HubAudit:          filepath.Join(logs, "hub-audit.log"),
	}
}

// ErrNoState says that there is no sandbox in a folder.
var ErrNoState = errors.New("there is no such sandbox")

// ReadState returns the state last written by the sandbox that the options name. It may have been killed since; see
// [Running].
func ReadState(options Options) (State, error) {
	if err := options.complete(); err != nil {
		return State{}, err
	}
	data, err := os.ReadFile(stateFile(options.StateDir))
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, fmt.Errorf("%w: %s", ErrNoState, options.Name)
	} else if err != nil {
		return State{}, err
	}
	var state State
	if err := json.Unmarshal(data, &state); err != nil {
		return State{}, fmt.Errorf("reading %s: %w", stateFile(options.StateDir), err)
	}
	return state, nil
}

func stateFile(dir string) string { return filepath.Join(dir, "state.json") }

// write replaces the file at once, so that a reader never sees half of it.
func (s State) write(dir string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(stateFile(dir), data)
}

func replaceFile(path string, data []byte) error {
	temporary := path + ".tmp"
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}
