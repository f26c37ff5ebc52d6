package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"slices"
)

// maxRequest limits the size of a request, in bytes.
const maxRequest = 1 << 20

// Handler serves the control.
func Handler(c Control) http.Handler {
	mux := http.NewServeMux()
	optional := optionalOperations(c)
	operations := map[string]operation{
		NewEnvironment: func(ctx context.Context, _ Request) (Response, error) {
			environment, err := c.NewEnvironment(ctx)
			if err != nil || environment == nil {
				return Response{}, err
			}
			with := *environment
			with.Operations = slices.Sorted(maps.Keys(optional))
			return Response{Environment: &with}, nil
		},
		EndEnvironment: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.EndEnvironment(ctx, r.Cluster)
		},
		CreateNodeGroup: func(ctx context.Context, r Request) (Response, error) {
			if r.Deployment == nil {
				return Response{}, errNoDeployment
			}
			id, err := c.CreateNodeGroup(ctx, r.Cluster, *r.Deployment)
			return Response{NodeGroupID: id}, err
		},
		UpdateNodeGroup: func(ctx context.Context, r Request) (Response, error) {
			if r.Deployment == nil {
				return Response{}, errNoDeployment
			}
			return Response{}, c.UpdateNodeGroup(ctx, r.Cluster, *r.Deployment)
		},
		DeleteNodeGroup: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.DeleteNodeGroup(ctx, r.Cluster, r.Name)
		},
		HoldMachines: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.HoldMachines(ctx, r.Cluster, r.Name, r.Hold)
		},
		ProvisionMachine: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.ProvisionMachine(ctx, r.Cluster, r.ClaimID)
		},
		JoinNode: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.JoinNode(ctx, r.Cluster, r.Machine)
		},
		LoseMachine: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.LoseMachine(ctx, r.Cluster, r.Machine)
		},
		ExpireTokens: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, c.ExpireTokens(ctx, r.Cluster)
		},
	}
	maps.Copy(operations, optional)
	for name, do := range operations {
		mux.HandleFunc("POST /v1/"+name, func(w http.ResponseWriter, r *http.Request) {
			request, err := read(w, r)
			if err != nil {
				answer(w, http.StatusBadRequest, Response{Error: err.Error()})
				return
			}
			response, err := do(r.Context(), request)
			if err != nil {
				answer(w, http.StatusConflict, Response{Error: err.Error()})
				return
			}
			answer(w, http.StatusOK, response)
		})
	}
	return mux
}

// operation does what a request asks for.
type operation func(context.Context, Request) (Response, error)

// optionalOperations returns the optional operations that the control has.
func optionalOperations(c Control) map[string]operation {
	sets, ok := c.(NodePoolSets)
	if !ok {
		return nil
	}
	return map[string]operation{
		ApplyNodePoolSet: func(ctx context.Context, r Request) (Response, error) {
			if r.NodePoolSet == nil {
				return Response{}, errNoNodePoolSet
			}
			return Response{}, sets.ApplyNodePoolSet(ctx, r.Cluster, *r.NodePoolSet)
		},
		DeleteNodePoolSet: func(ctx context.Context, r Request) (Response, error) {
			return Response{}, sets.DeleteNodePoolSet(ctx, r.Cluster, r.Name)
		},
	}
}

var (
	errNoDeployment  = errors.New("deployment: is missing")
	errNoNodePoolSet = errors.New("nodePoolSet: is missing")
)

func read(w http.ResponseWriter, r *http.Request) (Request, error) {
	// Browsers let pages send requests with other content types to loopback without a preflight.
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return Request{}, errors.New("the Content-Type must be application/json")
	}
	var request Request
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&request); err != nil {
		return Request{}, fmt.Errorf("reading the request: %w", err)
	}
	return request, nil
}

func answer(w http.ResponseWriter, code int, response Response) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if err := json.NewEncoder(w).Encode(response); err != nil {
		return // The caller detects a partial response.
	}
}
