// Package cost counts the agent's requests to the hub's API server, from that server's audit log.
package cost

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// AgentUser is the prefix of the agent's user name: its ServiceAccount.
const AgentUser = "system:serviceaccount:karpenter-capi-system:"

// Request is a completed request.
type Request struct {
	User string
	Verb string
	// Resource is the plural name, followed by a slash and the subresource if any.
	Resource string
	Name     string
	// Code is the HTTP status of the answer.
	Code int
	Time time.Time
	// Body is the body of the request, or nil if the audit policy does not record it.
	Body json.RawMessage
}

// Writes reports whether the request is a write.
func (r Request) Writes() bool {
	switch r.Verb {
	case "get", "list", "watch":
		return false
	}
	return true
}

// Refused reports whether the request failed.
func (r Request) Refused() bool { return r.Code >= 400 }

func (r Request) String() string {
	return fmt.Sprintf("%s %s %s %s: %d", r.Time.Format("15:04:05.000"), r.Verb, r.Resource, r.Name, r.Code)
}

// Log is an audit log that is being written. Requests are logged before they are answered.
type Log struct {
	path   string
	offset int64
}

// Open starts at the current end of the log.
func Open(path string) (*Log, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("the API server has no audit log: %w", err)
	}
	return &Log{path: path, offset: info.Size()}, nil
}

// event is the relevant part of an audit.k8s.io/v1 Event.
type event struct {
	Stage string `json:"stage"`
	Verb  string `json:"verb"`
	User  struct {
		Username string `json:"username"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	RequestObject  json.RawMessage `json:"requestObject"`
	StageTimestamp time.Time       `json:"stageTimestamp"`
}

// Next returns the requests, in order of their answers, that were answered since the last call to
// users whose name has the given prefix.
func (l *Log) Next(user string) ([]Request, error) {
	file, err := os.Open(l.path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	if _, err := file.Seek(l.offset, io.SeekStart); err != nil {
		return nil, err
	}
	var requests []Request
	lines := bufio.NewReader(file)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return requests, nil // an unfinished line is read next time
		} else if err != nil {
			return nil, err
		}
		l.offset += int64(len(line))
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("reading the audit log: %w", err)
		}
		if !strings.HasPrefix(e.User.Username, user) {
			continue
		}
		resource := e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			resource += "/" + e.ObjectRef.Subresource
		}
		requests = append(requests, Request{
			User: e.User.Username, Verb: e.Verb, Resource: resource, Name: e.ObjectRef.Name,
			Code: e.ResponseStatus.Code, Time: e.StageTimestamp, Body: e.RequestObject,
		})
	}
}

// ReplicasBy returns the change of replicas by the agent's JSON patch of a MachineDeployment, which
// tests the old value and replaces it. It returns zero for a patch that leaves them alone.
func ReplicasBy(r Request) (int, error) {
	var patch []struct {
		Op    string          `json:"op"`
		Path  string          `json:"path"`
		Value json.RawMessage `json:"value"`
	}
	if err := json.Unmarshal(r.Body, &patch); err != nil {
		return 0, fmt.Errorf("%s is not a JSON patch: %w", r, err)
	}
	values := map[string]int{}
	for _, operation := range patch {
		if operation.Path != "/spec/replicas" {
			continue
		}
		var value int
		if err := json.Unmarshal(operation.Value, &value); err != nil {
			return 0, fmt.Errorf("%s: %w", r, err)
		}
		values[operation.Op] = value
	}
	after, changes := values["replace"]
	if !changes {
		return 0, nil
	}
	before, tested := values["test"]
	if !tested {
		return 0, fmt.Errorf("%s changes replicas without testing them", r)
	}
	return after - before, nil
}
